"""The side that has the devices: what `opweave serve-devices` runs."""
