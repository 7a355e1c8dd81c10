"""Jobs on this machine: in this process, or in one process for each GPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import Queue

import torch

from factorized.experiments.reproduce.job import AtOnce, Job, Outcome, run_job
from factorized.experiments.training.interrupt import Interrupted, StopRequest
from factorized.experiments.training.progress import Reporter

LOOK = 0.5  # seconds between two looks at whether to stop
_device: str | None = None  # of a process of the pool


class LocalEngine:
    """One job at a time in this process; with several devices, a process for each, and seeds of a recipe stay together.

    Small networks leave a GPU idle: ``at_once`` seeds of a recipe take turns on it. Or a device is given twice.
    """

    def __init__(self, devices: Sequence[str], report: Callable[[], Reporter], at_once: AtOnce = 1) -> None:
        self.devices, self.report = tuple(devices), report
        shared = len(set(self.devices)) < len(self.devices)
        self.at_once: AtOnce = 1 if at_once == "auto" and shared else at_once

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Yield how each job ended."""
        if len(self.devices) > 1 and len(jobs) > 1:
            yield from self._in_processes(jobs)
            return
        for job in jobs:
            yield run_job(job, self.devices[0], self.report(), self.at_once)

    def _in_processes(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        left = list(jobs)
        while left:  # the processes of a pool end when one of them is killed; others do what it left
            yield from self._in_pool(left)

    def _in_pool(self, left: list[Job]) -> Iterator[Outcome]:
        """Run jobs, which are taken from ``left``, until all have ended or a process was killed."""
        fresh = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        free: Queue[str] = fresh.Queue()
        for device in self.devices:
            free.put(device)
        threads = max(1, torch.get_num_threads() // len(self.devices))
        pool = ProcessPoolExecutor(len(self.devices), fresh, initializer=_begin, initargs=(free, threads))
        running: dict[Future[Outcome], Job] = {}
        broken = False
        with StopRequest() as stop:
            try:
                while running or (left and not broken):
                    # no more than there are processes: a pool would begin a job that waits even after a signal
                    while left and not broken and len(running) < len(self.devices):
                        try:
                            future = pool.submit(_run, left[0], self.at_once)
                        except BrokenProcessPool:
                            broken = True
                        else:
                            running[future] = left.pop(0)
                    done, _ = wait(running, timeout=LOOK, return_when=FIRST_COMPLETED)
                    broken = broken or any(isinstance(future.exception(), BrokenProcessPool) for future in done)
                    yield from (_outcome(future, running.pop(future)) for future in done)
                    stop.check()
            except Interrupted as stopped:
                for process in multiprocessing.active_children():
                    os.kill(process.pid or 0, signal.SIGTERM)
                wait(running)  # until they have saved themselves
                raise Interrupted(stop.number or stopped.number) from None
            finally:
                pool.shutdown(cancel_futures=True)


def _begin(free: Queue[str], threads: int) -> None:
    """Take a device, once for the life of a process; signals come from the engine, and reach training alone."""
    global _device
    _device = free.get()
    os.setpgrp()  # Ctrl-C reaches every process of a group, and a second signal would end the training unsaved
    torch.set_num_threads(threads)
    for number in StopRequest.SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _run(job: Job, at_once: AtOnce) -> Outcome:
    return run_job(job, _device, at_once=at_once)


def _outcome(future: Future[Outcome], job: Job) -> Outcome:
    try:
        return future.result()
    except BrokenProcessPool:
        return Outcome(job, [], "its process, or one beside it, was killed; give the same command once more")
