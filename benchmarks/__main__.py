"""``python -m benchmarks``: run the benchmarks; each prints what it measured."""

from benchmarks import imports, memory

if __name__ == "__main__":
    imports.main()
    memory.main()
