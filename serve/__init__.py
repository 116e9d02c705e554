"""The gRPC front door: protocol, server, client, metrics."""
