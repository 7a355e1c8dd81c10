"""The application: the paper's networks, data, recipes, training, results and the command line."""
