"""`python -m advisor`, which is how torchrun starts `advise`: `torchrun ... -m advisor probe`."""

from advisor.cli.main import main

if __name__ == "__main__":
    main()
