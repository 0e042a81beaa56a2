"""MindSpore's own containers of parameters."""

import mindspore as ms
import numpy as np

import hyper_ckpt


def test_parameter_tuples(tmp_path):
    def parameters(fill):
        made = [ms.Parameter(ms.Tensor(np.full((2, 3), fill + n, np.float32)), name=f"p{n}") for n in range(2)]
        return ms.ParameterTuple(made)

    hyper_ckpt.save({"weights": parameters(1.0), "all": {"m": [parameters(5.0)]}}, tmp_path / "c")
    target = {"weights": parameters(0.0), "all": {"m": [parameters(0.0)]}}
    own = [*target["weights"]]
    hyper_ckpt.load(target, tmp_path / "c")
    assert type(target["weights"]) is ms.ParameterTuple
    assert all(a is b for a, b in zip(target["weights"], own, strict=True))
    assert [float(p.asnumpy()[0, 0]) for p in target["weights"]] == [1.0, 2.0]
    assert float(target["all"]["m"][0][1].asnumpy()[1, 1]) == 6.0
    found = hyper_ckpt.read(tmp_path / "c")["weights"]
    assert type(found) is tuple
    assert np.array_equal(found[1], np.full((2, 3), 2.0))
    cells = ms.nn.CellList([ms.nn.Dense(2, 2), ms.nn.Dense(2, 3)])
    hyper_ckpt.save({"net": cells, "trainable": ms.ParameterTuple(cells.trainable_params())}, tmp_path / "d")
    metadata = hyper_ckpt.read_metadata(tmp_path / "d")
    assert "trainable/0" in metadata.state_dict_metadata
