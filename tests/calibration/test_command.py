"""``kvpass calibrate``: what it writes serves ``kvpass eval``; bad input is one line."""

from command_line import invoke
from kvpass.calibration.texts import generated_texts


def test_a_file_of_the_command_is_an_option_of_the_policy(tmp_path):
    folder, output = tmp_path / "texts", tmp_path / "made" / "kvzap.safetensors"
    folder.mkdir()
    for number, text in enumerate(generated_texts(words=40, rounds=1)):
        (folder / f"{number}.txt").write_text(text)
    call = ["calibrate", "builtin", "--output", output, "--texts", folder, "--tokens", "48"]
    made = invoke(*call)
    assert made.exit_code == 0, made.output
    assert "R2 " in made.output and f"written: {output}, {output.stat().st_size} bytes" in made.output.replace("\n", "")
    spec = f"kvzap:weights={output},window=8"
    how = "--budgets 64 --samples 1 --scope context --length 256 --backend eager"
    scored = invoke("eval", "builtin", "--policies", spec, *how.split(), "--output", tmp_path / "eval")
    assert scored.exit_code == 0 and "kvzap" in scored.output, scored.output
    (folder / "0.txt").write_bytes(b"\xff")
    refused = invoke(*call)
    assert refused.exit_code == 2 and refused.output.startswith("error: document=")
