"""``opweave new-backend``: writes the package of a new backend, which passes the suite as it stands."""
