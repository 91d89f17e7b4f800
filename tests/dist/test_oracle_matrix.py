"""Every path equals dense float64 attention: out, lse and all gradients."""

import pytest
import torch

from tests import matrix


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sampled_case" in metafunc.fixturenames:
        cases = matrix.sample(metafunc.config.getoption("--matrix-seed"), at_least=60)
        # Every pair of values is in them. They stand in the order of cp, so every second one is of every group size.
        often = [pytest.param(case, marks=pytest.mark.slow if i % 2 else []) for i, case in enumerate(cases)]
        metafunc.parametrize("sampled_case", often, ids=[str(case) for case in cases])


def test_sampled_case_equals_oracle(ranks, sampled_case: matrix.Case) -> None:
    ranks(sampled_case.cp).run(matrix.check, sampled_case)


# In parts, so that one test is a few minutes. A part is a run of lengths and masks.
PARTS = 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("cp", matrix.WHOLE_CP)
def test_whole_matrix_equals_oracle(ranks, cp: int, part: int) -> None:
    """In float64; the samples are in float32, too."""
    failures: list[str] = []
    worst: dict[str, float] = {}
    cases = [case for case in matrix.whole() if case.cp == cp]
    cases = cases[part * len(cases) // PARTS : (part + 1) * len(cases) // PARTS]
    for case in cases:
        outcomes = ranks(cp).outcomes(matrix.check, case, torch.float64)
        failures += [
            f"{case} rank {r}: {text.strip().splitlines()[-1]}" for r, (ok, text) in enumerate(outcomes) if not ok
        ]
        if outcomes[0][0]:
            worst = {name: max(error, worst.get(name, 0.0)) for name, error in outcomes[0][1].items()}
    errors = ", ".join(f"{name.split()[0]} {error:.0e}" for name, error in sorted(worst.items()))
    print(f"cp {cp}, part {part + 1} of {PARTS}: {len(cases)} cases, {len(failures)} failures; largest errors {errors}")
    assert not failures, f"{len(failures)} failures\n" + "\n".join(failures[:50])
