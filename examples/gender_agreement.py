"""Which word does "rica" attend to? A small decoder learns gender agreement in Spanish; then its attention is drawn.

Usage: python -m examples.gender_agreement [WORKDIR]

In "El arroz se cocinó en la olla y estaba rico" the last word agrees with the dish, not with the nearer pot. After 40
seconds of training on 2 CPU cores, the model completes sentences with pairs of dish and pot that it has never seen.
"""

import itertools
import json
import random
import sys
from pathlib import Path

from transformer.__main__ import main as command_line
from transformer.config import Execution, RotaryOptions, TransformerConfig
from transformer.data import JsonLines, TokenizerConfig
from transformer.generate import Sampling, generate
from transformer.training import OptimizerConfig, Recipe, TrainingConfig, load_run, train

DISHES = {"a": "La sopa,La pizza,La tortilla,La carne,La salsa", "o": "El arroz,El guiso,El pescado,El pollo,El caldo"}
POTS = ("en la olla", "en la sartén", "en la cazuela", "en el horno", "en el caldero", "en el plato")
UNSEEN = {("La sopa", "en la olla"), ("El arroz", "en la olla"), ("La carne", "en el horno")}


def sentences() -> list[str]:
    dishes = [(dish, end) for end, names in DISHES.items() for dish in names.split(",")]
    verbs, tastes = ("cocinó", "preparó", "calentó", "quedó"), ("ric", "frí", "salad", "buen", "quemad")
    every = itertools.product(dishes, verbs, POTS, tastes)
    known = [f"{d} se {verb} {pot} y estaba {t}{end}" for (d, end), verb, pot, t in every if (d, pot) not in UNSEEN]
    return random.Random(0).sample(known, len(known))


def main(workdir: str = "runs/gender_agreement", steps: int = 300) -> dict[str, str]:
    path = Path(workdir, "sentences.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences()), encoding="utf-8")
    recipe = Recipe(
        name="gender_agreement",
        model=TransformerConfig(d_model=64, num_layers=2, num_heads=4, position=RotaryOptions()),
        data=JsonLines(path=str(path), sequence_length=32, batch_size=32, tokenizer=TokenizerConfig(kind="word")),
        execution=Execution(scan=False),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=30),
        training=TrainingConfig(steps=steps),
    )
    train(recipe, workdir).exit_if_stopped()
    run, prompts = load_run(workdir), [f"{dish} se cocinó {pot} y estaba" for dish, pot in sorted(UNSEEN)]
    ids = [run.tokenizer.encode(prompt) for prompt in prompts]
    words = generate(run.model, run.params, ids, max_new_tokens=1, sampling=Sampling(temperature=0.0))
    answers = dict(zip(prompts, map(run.tokenizer.decode, words), strict=True))
    print("\nnot in the training data:", *(f"  {prompt} -> {word}" for prompt, word in answers.items()), sep="\n")
    command_line(["inspect", "text", workdir, "--prompt", "La sopa se cocinó en la olla y estaba rica", "--sizes"])
    return answers


if __name__ == "__main__":
    main(*sys.argv[1:])
