# Scripts that make golden files need other libraries than the tests do.
collect_ignore_glob = ["make_*.py"]
