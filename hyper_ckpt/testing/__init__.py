"""Tools for tests of platforms, stores and jobs: a world of ranks as threads, a launcher of processes."""
