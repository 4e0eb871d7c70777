"""Tools for engineers: comparing devices node by node, scripts that reproduce a difference, timelines of runs."""
