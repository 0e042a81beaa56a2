"""Two hosts, played by two network namespaces that this test makes: what listens where, and who gets in."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hyper_ckpt

NAMES = ("hyper-ckpt-a", "hyper-ckpt-b")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
JOB = """
import os, socket, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import hyper_ckpt
from hyper_ckpt.key_value import Address, KeyValueClient

rank, root = int(sys.argv[1]), Path(sys.argv[2])
os.environ["GLOO_SOCKET_IFNAME"] = "hck0"  # the job's own group needs it here, ours do without
dist.init_process_group("gloo", rank=rank, world_size=2)
del os.environ["GLOO_SOCKET_IFNAME"]
for step in range(2):
    state = {"w": torch.arange(1000.0) + step, "own": hyper_ckpt.PerRank(rank)}
    hyper_ckpt.save(state, root / f"step-{step}", timeout=60)
    target = {"w": torch.zeros(1000), "own": hyper_ckpt.PerRank(None)}
    hyper_ckpt.load(target, root / f"step-{step}", timeout=60, share_reads=True)
    assert torch.equal(target["w"], state["w"])

if rank == 0:
    from hyper_ckpt_torch.platform import default
    address = default().ranks.key_value_store.address
    Path(root / "address").write_text(f"{address.host} {address.port}")
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":  # listens
            host, port = local.split(":")
            with open(root / "listening", "a") as file:
                print(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16), file=file)
else:
    while not (root / "address").exists() or not (root / "address").read_text():
        time.sleep(0.05)
    host, port = (root / "address").read_text().split()
    try:  # reachable from the other host, but not without the job's token
        KeyValueClient(Address(host, int(port), "guessed"), lambda: 20.0).set("x", b"y")
    except hyper_ckpt.CheckpointError:
        (root / "refused").touch()
dist.barrier()
os._exit(0)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[None]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and the command `ip`")
    made = []
    try:
        try:
            for name in NAMES:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", "hck0", "netns", NAMES[0], "type", "veth", "peer", "name", "hck0", "netns", NAMES[1])
            for name, address in zip(NAMES, ADDRESSES, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "hck0")
                ip("-n", name, "link", "set", "hck0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode().strip()}")
        yield
    finally:
        for name in made:
            ip("netns", "delete", name)


@pytest.mark.usefixtures("hosts")
def test_ranks_on_two_hosts(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    env = {**os.environ, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511"}
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, str(script), str(rank), str(tmp_path)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank, name in enumerate(NAMES)
    ]
    try:
        outputs = [rank.communicate(timeout=55)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    host, port = (tmp_path / "address").read_text().split()
    assert host == ADDRESSES[0]
    listening = [line.split() for line in (tmp_path / "listening").read_text().splitlines()]
    assert {where for where, at in listening if at == port} == {ADDRESSES[0]}
    assert (tmp_path / "refused").exists()
    assert hyper_ckpt.verify(tmp_path / "step-1").ok
