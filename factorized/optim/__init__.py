"""LAMB, and FLAMBé: LAMB with decoupled Frobenius decay."""
