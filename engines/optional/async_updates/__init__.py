"""Parameter updates: servers, asynchronous updates, and replicas that meet now and then."""
