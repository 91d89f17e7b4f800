"""Every path equals dense float64 attention: out, lse and all gradients."""

import pytest

from tests import matrix


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sampled_case" in metafunc.fixturenames:
        cases = matrix.sample(metafunc.config.getoption("--matrix-seed"), at_least=156)
        metafunc.parametrize("sampled_case", cases, ids=str)


def test_sampled_case_equals_oracle(ranks, sampled_case: matrix.Case) -> None:
    ranks(sampled_case.cp).run(matrix.check, sampled_case)


@pytest.mark.slow
@pytest.mark.parametrize("cp", matrix.WHOLE_CP)
def test_whole_matrix_equals_oracle(ranks, cp: int) -> None:
    failures: list[str] = []
    worst: dict[str, float] = {}
    cases = [case for case in matrix.whole() if case.cp == cp]
    for case in cases:
        outcomes = ranks(cp).outcomes(matrix.check, case)
        failures += [
            f"{case} rank {r}: {text.strip().splitlines()[-1]}" for r, (ok, text) in enumerate(outcomes) if not ok
        ]
        if outcomes[0][0]:
            worst = {name: max(error, worst.get(name, 0.0)) for name, error in outcomes[0][1].items()}
    print(f"cp {cp}: {len(cases)} cases, {len(failures)} failures; largest absolute errors:")
    for name, error in sorted(worst.items()):
        print(f"  {name}: {error:.1e}")
    assert not failures, f"{len(failures)} failures\n" + "\n".join(failures[:50])
