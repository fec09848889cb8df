"""Whole-mesh suites: real processes, real Redis, real gRPC, a real model."""
