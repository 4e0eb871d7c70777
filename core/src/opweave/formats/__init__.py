"""Files of weights: `opweave.load_weights`, and the formats that the core reads by itself."""
