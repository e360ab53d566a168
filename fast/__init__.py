"""Fast twins of the plain forms in the scripts: the same signature, held to them by tests in float64."""
