"""How the demo looks: tables and panels for 80 columns, also without a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table

MB = 1e6


class Report:
    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.console.width = min(self.console.width, 100)
        self._chapters = 0

    def title(self, title: str, text: str) -> None:
        self.console.print(Panel(text, title=f"[bold]{title}[/]", title_align="left", box=box.ROUNDED))

    def chapter(self, text: str) -> None:
        self._chapters += 1
        self.console.print(f"\n[bold cyan]{self._chapters}  {text}[/]")

    def done(self, text: str) -> None:
        """A line of the story."""
        self.console.print(Padding(text, (0, 0, 0, 3), expand=False))

    def proved(self, claim: str) -> None:
        line = Table.grid(padding=(0, 1))
        line.add_row("   [green]✓[/]", claim)
        self.console.print(line)

    def failed(self, message: str, outputs: Sequence[str]) -> None:
        for rank, output in enumerate(outputs):
            self.console.rule(f"rank {rank}", align="left")
            self.console.print(escape(output.strip()) or "(printed nothing)", soft_wrap=True)
        self.console.print(Panel(escape(message), title="[bold]FAILED[/]", title_align="left", style="red"))

    def output(self, command: str, text: str) -> None:
        self.console.print(f"   [bold]$ {command}[/]")
        for line in text.rstrip().splitlines():
            self.console.print(f"   {escape(line)}", soft_wrap=True)
        self.console.print()

    def losses(self, reference: Mapping[int, float], resumed: Mapping[int, Mapping[int, float]], saved_at: int) -> None:
        """The reference beside the runs that were resumed, by number of ranks."""
        table = Table(
            box=box.SIMPLE_HEAD,
            caption="= the same bits. Elsewhere the difference: on another number of ranks other activations are "
            "dropped out, and sums have another order.",
            caption_justify="left",
        )
        table.add_column("step", justify="right")
        for name in ("uninterrupted", *(f"resumed on {ranks}" for ranks in resumed)):
            table.add_column(name, no_wrap=True)
        for step, loss in reference.items():
            if step > saved_at:
                compared = [_compared(losses[step], loss) for losses in resumed.values()]
            else:
                compared = ["[dim](saved)[/]" if step == saved_at else ""] * len(resumed)
            if step in (1, 2) or step >= saved_at - 1:
                table.add_row(f"{step}", f"{loss:.7f}", *compared, end_section=step == saved_at)
            elif step == 3:
                table.add_row("...", "...")
        self.console.print(table)

    def throughput(self, nbytes: int, measured: Mapping[str, Mapping[str, float]], caption: str) -> None:
        table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
        for name in ("", "time", "speed", "bare loop", "of the loop", "loop : loop"):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        for name, seconds in measured.items():
            ours, floor = seconds["ours"], seconds["floor"]
            table.add_row(
                f"[bold]{name}[/]",
                f"{ours * 1e3:.0f} ms",
                f"{nbytes / ours / MB:,.0f} MB/s",
                f"{nbytes / floor / MB:,.0f} MB/s",
                f"[bold]{floor / ours:.2f}[/]",
                f"{floor / seconds['floor again']:.2f}",
            )
        self.console.print(table)

    def verdict(self, lines: Sequence[str]) -> None:
        text = "\n".join(f"[green]✓[/] {line}" for line in lines)
        self.console.print(Panel(text, title="[bold green]All proofs hold[/]", title_align="left", box=box.ROUNDED))


def _compared(loss: float, reference: float) -> str:
    return f"{loss:.7f} =" if loss == reference else f"{loss:.5f} {loss - reference:+.5f}"
