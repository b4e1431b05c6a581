"""`report.html`: a run's folder as one page that opens anywhere."""

from lora_trainer.report.write import FILE, advice_lines, write_comparison, write_report

__all__ = ["FILE", "advice_lines", "write_comparison", "write_report"]
