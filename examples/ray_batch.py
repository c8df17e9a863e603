"""Answer a file of requests (OpenAI's batch form) with the workers of a Ray cluster.

All nodes share a file system with the files. Each task loads the model and answers its share of the requests; a task
whose worker is lost runs again and computes only what is missing. Needs Ray: `pip install ray`.

Usage: python -m examples.ray_batch MODEL REQUESTS ANSWERS [--workers 2] [--gpus 0]
"""

import argparse

import transformer.__main__


def answer(model, requests, answers, shard, options):
    """Answer the requests of one shard, in a worker."""
    command = ["batch", model, requests, "--output", answers, "--shard", shard, *options]
    if code := transformer.__main__.main(command):
        raise RuntimeError(f"shard {shard} has ended with code {code}; its log has the reason")
    return shard


def run(model, requests, answers, workers=2, gpus=0, options=()):
    """Return the shards in the order in which they were complete."""
    import ray  # not at the top: --help works without it

    ray.init(ignore_reinit_error=True)
    # One process per task: a process keeps the memory of its GPU until it ends.
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=3, retry_exceptions=True, max_calls=1)(answer)
    waiting = [task.remote(model, requests, answers, f"{i}/{workers}", options) for i in range(workers)]
    complete = []
    while waiting:
        ended, waiting = ray.wait(waiting)
        complete += ray.get(ended)
        print(f"{len(complete)} of {workers} shards are complete")
    return complete


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "requests", "answers"):
        parser.add_argument(name)
    parser.add_argument("--workers", type=int, default=2, help="number of tasks, each with a process")
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs per task")
    run(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
