# Scripts that need other libraries than the tests do: `tests/run_other_programs.sh` runs them.
collect_ignore_glob = ["*.py"]
