"""Complete the prompts of JSON lines with engines on Ray.

    pip install '.[ray]'
    python examples/ray_data.py prompts.jsonl answers --num-actors 2 --max-new-tokens 64

Each line has a "prompt"; `answers` becomes a directory of JSON lines with the columns text,
finish_reason and error in addition. A repeated run makes the same texts.
"""

from __future__ import annotations

import argparse

from jspec.distributed.ray_data import Generate


def main() -> None:
    import ray

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts")
    parser.add_argument("answers")
    parser.add_argument("--model-path")
    parser.add_argument("--num-actors", type=int, default=1)
    parser.add_argument("--num-gpus", type=float, default=0, help="of each actor")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    ray.data.read_json(options.prompts).map_batches(
        Generate,
        fn_constructor_kwargs={
            "model_path": options.model_path,
            "sampling_params": {"max_new_tokens": options.max_new_tokens},
        },
        batch_size=64,
        concurrency=options.num_actors,
        num_gpus=options.num_gpus,
    ).write_json(options.answers)


if __name__ == "__main__":
    main()
