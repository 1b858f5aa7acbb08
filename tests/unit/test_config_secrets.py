"""Secrets in a run file are refused with their place, quoted nowhere, and nothing else is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from isles.cli import main
from isles.config.load import load_run_file
from isles.config.secrets import secret_errors
from isles.errors import ConfigErrors
from isles.facts.secrets import Redactor, secrets_in, without_secrets
from tests.run_files import faults

ROOT = Path(__file__).parents[2]
PW = "Xq7-s3cr3t"  # no value of another kind looks like this
HF = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ"
GITHUB = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6"
HEX = "0123456789abcdef0123456789abcdef01234567"
BASE = "model: {name_or_path: m}\ndata: {sources: [{path: d}]}\ntraining: {max_steps: 5}\n"

BAD: tuple[tuple[str, Any], ...] = (
    ("name", HF),
    ("output_dir", f"/runs/{GITHUB}"),
    ("model.name_or_path", f"https://u:{PW}@host/model"),
    ("tokenizer.name_or_path", f"https://{HF}@host/model"),
    ("data.sources.0.path", f"https://u:{PW}@host/a.jsonl"),
    ("data.sources.0.path", f"https://host/a.jsonl?sig=abc%2F{PW}"),
    ("data.sources.0.path", f"https://host/a.jsonl?token={PW}"),
    ("checkpoint.remote", f"s3://AKIA{'A1' * 8}:{PW}@bucket/x"),
    ("track", [{"kind": "wandb", "project": HF}]),
    ("training.script_args", ["--lr", "1", "--password", PW]),
    ("training.script_args", [f"--api-key={PW}"]),
    ("training.script_args", ["docker", "login", "-u", "bob", "-p", PW, "reg.io"]),
    ("training.script_args", ["mysql", "-uroot", f"-p{PW}"]),
    ("training.script_args", ["curl", "-u", f"bob:{PW}", "https://x"]),
    ("training.script_args", ["redis-cli", "-a", PW]),
    *(
        (f"clusters.0.environment.{key}", value)
        for key, value in (
            ("variables", {"MY_URL": f"postgres://u:{PW}@h/db"}),
            ("variables", {"HTTPS_PROXY": f"http://u:{PW}@proxy:3128"}),
            ("variables", {"HTTPS_PROXY": f"u:{PW}@proxy:3128"}),
            ("variables", {"PIP_INDEX_URL": f"https://__token__:{PW}@pypi.example/simple"}),
            ("variables", {"WANDB_API_KEY": HEX}),
            ("variables", {"PGPASSWORD": PW}),
            ("variables", {"HF_TOKEN": "$HF_TOKEN"}),
            ("variables", {"OTHER": HF}),
            ("variables", {"DBPASS": PW}),
            ("variables", {"DB_PASS": "12345"}),
            ("variables", {"BACKEND_TOKEN": PW}),
            ("variables", {"PIP_INDEX_URL": f"https://{PW}@pypi.example/simple"}),
            ("variables", {"UV_INDEX_URL": "https://abcdefgh@pypi.example/root/simple/"}),
            ("setup", [f"export WANDB_API_KEY={HEX}"]),
            ("setup", ["true", f"export OPENAI_API_KEY='sk-proj-{'a1' * 12}'"]),
            ("setup", [f"hf auth login --token {HF}"]),
            ("setup", [f"curl -H 'Authorization: Bearer {PW}' https://host"]),
            ("setup", [f"curl -u me:{PW} https://host"]),
            ("setup", [f"mysql --password {PW}"]),
            ("setup", [f"sshpass -p {PW} ssh host"]),
            ("setup", [f"echo 'machine h login u password {PW}' > ~/.netrc"]),
            ("setup", [f"export A_TOKEN=${{A:-{PW}}}"]),
            ("setup", [f"git clone https://x:p${PW}@github.com/a/b"]),
            ("packages", [f"git+https://u:{PW}@github.com/a/b"]),
            ("packages", [f"git+https://{GITHUB}@github.com/a/b"]),
            ("container", f"docker://u:{PW}@registry.example/image"),
            ("container", {"image": "i", "extra": [f"--env=HF_TOKEN={HF}"]}),
            ("container", {"image": "i", "extra": ["--token", PW]}),
            ("container", {"image": "i", "extra": ["docker", "login", "-p", PW]}),
        )
    ),
    ("clusters.0.launcher", {"kind": "slurm", "extra": [f"--export=API_KEY={PW}"]}),
    ("clusters.0.launcher", {"kind": "slurm", "extra": [f"--comment=xoxb-{'1a' * 8}"]}),
    ("clusters.0.launcher", {"kind": "skypilot", "resources": {"docker": {"password": PW}}}),
    ("clusters.0.launcher", {"kind": "skypilot", "file_mounts": {"/x": {"secret_key": PW}}}),
    ("clusters.0.environment.variables", {GITHUB: "1"}),
    ("description", f"-----BEGIN OPENSSH PRIVATE KEY-----\n{PW}"),
    ("outer", {"kind": "diloco", "sync_every": 5, "hub": f"isles://h:1/r#{PW}"}),
    ("WANDB_API_KEY", HEX),
)

GOOD = (
    *("s3://bucket/a:b@c", "git@github.com:x/y", "git+ssh://git@github.com/x/y@v1.2", "me@host"),
    *("https://user@dev.azure.com/org/project/_git/repo", "http://10.0.0.1:8265", "ray://h:10001"),
    *(
        "docker://ghcr.io/me/train:1.2",
        f"docker://a:1.2@sha256:{HEX}{HEX[:24]}",
        "a:1@sha256:" + HEX,
    ),
    *("registry:5000/me/image:1.2", "http://host:8080/a@2x.png", "http://[::1]:80/x", HEX, HEX * 2),
    *("hf://datasets/me/sets@main/*.parquet", "hf_transfer==0.1.9", "huggingface_hub[hf_transfer]"),
    *("export HF_TOKEN=$(cat ~/.secrets/hf)", "export HF_TOKEN=${HF_TOKEN}", "source ~/.tokens"),
    *('export WANDB_API_KEY="$(<~/.wandb)"', "export WANDB_API_KEY=$WANDB_API_KEY HF_HOME=/x"),
    *(
        "pip install git+https://x:${GH_TOKEN}@github.com/a/b",
        "curl -u me:$PW https://h",
        "sk-learn",
    ),
    *("export GOOGLE_APPLICATION_CREDENTIALS=/keys/a.json", "export AWS_PROFILE=me1234567"),
    *(
        "--token-file=/x/y",
        "--password-stdin",
        "--pad-token=<pad>",
        "--eos_token </s>",
        "--seq-key text",
    ),
    *("export TOKENIZERS_PARALLELISM=false", "podman --user=1000:1000", "docker run -u me:users x"),
    *(
        "basic tokenizers are trained",
        "the token: see docs",
        "a password is asked for",
        "--user me:me",
    ),
    *(
        "openai/gpt-oss-20b",
        "sk-models/sk-something-with-words",
        "task-sk",
        "eyJ",
        "num_tokens=512",
    ),
    *(
        "max_token=4096",
        "--num-tokens 5",
        "token=<|im_end|>",
        "ghcr.io/x/y",
        "xoxo-large",
        "AKIAMARU",
    ),
    *(
        "git config credential.helper store",
        "<your-token>",
        "HF_TOKEN=<your token>",
        "eos_token=</s>",
    ),
    *(
        "PASSWORD=***",
        "https://x:<password>@host",
        "nvidia/nvapi-tools",
        "r8_small",
        "--mask-token [MASK]",
    ),
    "/data/0123456789abcdef/wikitext:train@x",
    "C:\\keys\\token",
    "--key=value",
    "monkey=1",
    "turkey: 5",
)


BAD_LINES = (
    # Programs that take a secret by a short option, by none, or from their input.
    *(f"wandb login {HEX}", f"wandb login --relogin local-{HEX}", f"vault login hvs.{'aB1' * 5}"),
    *(f"wandb login --host https://w.example {HEX}", f"docker login -u bob -p {PW} reg.io"),
    *(f"podman login -p={PW} reg.io", f"az login --service-principal -u x -p {PW} --tenant y"),
    *(
        f"mysql -uroot -p{PW} db",
        f'mysqldump -u root -p"{PW} x" db',
        f"curl -sSu bob:{PW} https://x",
    ),
    *(f"curl -ubob:{PW} https://x", f"curl -b session={PW} https://x", f"wget --user a:{PW} x"),
    *(f"redis-cli -a {PW} ping", f"lftp -u u,{PW} ftp.example", f"smbclient -U bob%{PW} //h/s"),
    *(f"ldapsearch -w {PW} -x", f"openssl enc -k {PW}", f"openssl rsa -passin pass:{PW}"),
    *(
        f"sshpass -p{PW} ssh h",
        f"unzip -P {PW} a.zip",
        f"7z x -p{PW} a.7z",
        f"mongosh -u a -p {PW}",
    ),
    *(f"echo {PW} | docker login --password-stdin", f"echo '{PW}' | sudo -S ls"),
    *(f"gh auth login --with-token <<< {PW}", f"aws configure set aws_secret_access_key {PW}"),
    *(f"export TOKEN=$(echo {PW})", f"export TOKEN=`printf '%s' {PW}`", f"comet_api_key {PW}"),
    *(f"echo 'db:5432:*:bob:{PW}' > ~/.pgpass", f"curl -H 'X-Api-Key: {PW}' https://x"),
    *(f"x --password {PW}", f"x --token {PW}", f"MYSQL_PWD={PW} mysql"),
    *(f'["docker", "login", "-p", "{PW}"]', f"['mysql', '-p{PW}']", f'["curl","-u","a:{PW}"]'),
    *(f'wandb login "{HEX}"', f"wandb.login(key='{HEX}')", f'login("{PW}")', f"sqlplus u/{PW}@db"),
    *(
        f"curl -H 'api-key: {PW}' x",
        'wget --header="X-Auth-Token: abcdefgh" x',
        f"setenv GH_PAT {PW}",
    ),
    *(f"printf -v HF_TOKEN %s {PW}", f"read -r HF_TOKEN <<< {PW}", f"rclone obscure {PW}"),
    *(f"mc alias set m https://h.example AK {PW}", f"kubectl create x --from-literal=a={PW}"),
    *(
        f"echo machine h login u password {PW}",
        f"vault kv put secret/x a={PW}",
        f"useradd -p {PW} u",
    ),
    *(f"mount -t cifs //h/d /m -o user=me%{PW},ro", f"mount -ousername=d\\\\me%{PW} //h/d /m"),
    *(
        f"printf 'machine h login u password %s\\n' {PW}",
        f"sed -i 's/PASSWORD=.*/PASSWORD={PW}/' f",
    ),
    *(f"rclone config create r webdav pass {PW}", f"kaggle config set -n key -v {HEX}"),
    *(f"b2 authorize-account 0012ab {PW}", f"sed -i 's/^token = .*$/token = {PW}/' f"),
    *(f"curl --oauth2-bearer {PW} https://x", f"skopeo copy --src-creds u:{PW} a b"),
    *(f"twine upload -u u -p {PW} dist/x", f"poetry config http-basic.foo u {PW}"),
    *(f"poetry config pypi-token.pypi {PW}", f"ngrok config add-authtoken {PW}"),
    *("echo password | sudo -S ls", "echo abc1 | sudo -S ls", f"curl -o curl -u a:{PW} https://x"),
    *(f"docker login -u oc -p {PW}", f"docker login -u login -p {PW}"),
    # A here-string, also beside a reference.
    *(f"docker login $REG --password-stdin <<< {PW}", f"docker login --password-stdin $R <<< {PW}"),
    # These look like placeholders, or have names of data.
    *(
        f"HF_TOKEN=dummy{PW}",
        f"HF_TOKEN=xxxx{PW}",
        f"HF_TOKEN=YOUR_TOKEN_{PW}",
        f"HF_TOKEN=...{PW}",
    ),
    *(f"DATA_KEY={HEX}", f"PASSWORD=none.{PW}", f"PASSWORD='none of {PW}'", f"x_token={PW}"),
    # Values of which a part is a reference, or that the line itself prints.
    *('export HF_TOKEN="$PREFIX"abcdefgh123', "export HF_TOKEN=${PREFIX}abcdefgh123"),
    *(f"export HF_TOKEN=$(cat <<< {PW})", "export HF_TOKEN=$(base64 -d <<< aGZfYWJj)"),
    f"""export HF_TOKEN=$(python -c "print('{PW}')")""",
    # Users of an address that are keys.
    *("git clone https://hunter2secret@github.com/a/b", "pip install -i https://abcdef@h/simple x"),
    # Names.
    *(f"Server=d;Uid=bob;Pwd={PW};", f"PASS={PW}", f"export PW={PW}", f"export GH_PAT={PW}"),
    *(f"MYPW={PW}", f"--from-literal=pw={PW}", '{"auths": {"r.io": {"auth": "Ym9iOmh1bnRlcjI="}}}'),
    *(f"export DBPASS={PW}", f"dbpass={PW}", f"HF_TOKEN+={PW}", f"keytool -storepass {PW} -list"),
    *(f"os.environ['HF_TOKEN']='{PW}'", f'os.environ["HF_TOKEN"] = "{PW}"', f"x --sftp-pass {PW}"),
    '{"private_key": "-----BEGIN PRIVATE KEY-----\\nMIIE"}',
    # Addresses that are keys.
    f"conda config --set channel_alias https://conda.example/t/tk-{'1a2b' * 4}/x",
    f"pip config set global.index-url https://h.example/t/{HEX}",
    f"conda install -c https://conda.anaconda.org/t/ab-{HEX[:8]}-1234-1234-1234-{HEX[:12]}/me x",
    f"pip install -i https://dl.cloudsmith.io/{'aB1d' * 4}/org/repo/python/simple x",
    "https://hooks.slack.com/services/T00000000/B00000000/" + "X" * 24,
    f"https://discord.com/api/webhooks/123456789012345678/{'aB1-_' * 12}",
    f"https://chat.example/hooks/{'a1b2' * 6}",
    f"https://api.telegram.org/bot123456789:AA{'aB1' * 11}/sendMessage",
    f"https://chat.googleapis.com/v1/spaces/A/messages?key={'aB1' * 8}",
    f"https://h.example/a?key={'ab-' * 4}{'a1b2' * 4}",
    f"export SIGNATURE={'a1b2' * 8}",
    # Private keys.
    *("-----BEGIN PGP PRIVATE KEY BLOCK-----", "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----"),
    "PuTTY-User-Key-File-3: ssh-ed25519",
    # Prefixes of issuers.
    *("npm_" + "aB1" * 12, "pypi-AgEIcHlwaS5vcmc" + "aB1" * 4, "sk_" + "live_" + "aB1" * 6),
    *("dckr_pat_" + "aB1" * 6, "dop_v1_" + "a1" * 32, "ya29." + "aB1" * 8, "hvs." + "aB1" * 8),
    *("github_pat_" + "aB1" * 8, "SG." + "aB1" * 6 + "." + "aB1" * 6, "dapi" + "a1" * 16),
    *("ASIA" + "A1" * 8, "key-" + "a1" * 16, "SK" + "a1" * 16, "lin_api_" + "aB1" * 8),
    *("glrt-" + "aB1" * 7, "gsk_" + "aB1" * 9, "sntrys_" + "aB1" * 9, "glsa_" + "aB1" * 9),
    *("sk-ant-api03-" + "aB1" * 6, f"https://{'a1' * 16}@o1.ingest.sentry.io/1"),
)

GOOD_LINES = (
    *(
        "export SLURM_AUTH=munge",
        "time=1:00@2",
        "host:22@site",
        "auth: oauth2",
        "AUTH=scram-sha-256",
    ),
    *("export NCCL_IB_HCA=mlx5_0:1,mlx5_1:1", "NCCL_SOCKET_IFNAME=^lo,docker0", "NCCL_DEBUG=INFO"),
    *(
        "module load cuda/12.4 gcc/13.2.0",
        "conda activate isles-py312",
        "source ~/venv/bin/activate",
    ),
    "conda create -p /scratch/env -y python=3.12",
    "pip install -U torch==2.9.0 --index-url https://download.pytorch.org/whl/cu128",
    *(
        "srun -p gpu -a 1-4 -N 2",
        "sbatch --dependency=afterok:123:124:125:126 -p a100",
        "tar -b 20",
    ),
    *("rsync -a --password-file=/x/y h::m/ .", "mkdir -p /data/run1", "ssh -p 2222 me@login1"),
    *(
        "docker run -p 8080:80 -u 1000:1000 ghcr.io/a/b:1",
        "docker login -u bob reg.io",
        "mysql -p db",
    ),
    *(
        "mysql -u root -p",
        "mysql --port=3306 -P 3306",
        "curl -fsSL https://astral.sh/uv/install.sh | sh",
    ),
    *(
        "curl -b cookies.txt https://x",
        "wandb login",
        "wandb login --relogin",
        "vault login -method=oidc",
    ),
    *(
        "wandb login --host https://wandb.cluster1.example",
        "huggingface-cli login",
        "echo $PW | kinit me",
    ),
    *(
        "docker login --password-stdin < ~/.secrets/reg",
        "echo hello | tee a1.txt",
        "echo hello | sudo -S true",
        "cd $PWD && pwd",
    ),
    *(
        "PWD=build123",
        "PATH=/opt/a1/bin:$PATH",
        "FILE_PAT=*.parquet",
        "n_pass: 3",
        "two pass 2026 runs",
    ),
    *(
        "s3://bucket-1/runs/a1b2c3d4e5f6",
        "gs://b/o",
        "team@example2.org",
        "WANDB_ENTITY=team-2024-nlp",
    ),
    *(
        "meta-llama/Llama-3.1-8B-Instruct",
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",
        "unsloth/gemma-3-4b-it",
    ),
    *("TheBloke/Mixtral-8x7B-v0.1-AWQ", f"git checkout {HEX}", f"git+https://github.com/a/b@{HEX}"),
    *(
        "sha256:" + HEX + HEX[:24],
        "npm_config_cache=/x",
        "hf_transfer",
        "key-value-store-of-run-2026",
    ),
    *(
        "export TOKEN=$(cat $(dirname $0)/t)",
        'TOKEN=$(echo "$ALL" | cut -c1-8)',
        "MASTER_PORT=29500",
    ),
    *(
        "https://h.example/a?key=short",
        "https://h.example/a?part=2&key=train-shards-0001",
        "https://h.example/a?key=corpora/web_text/train-00012.parquet",
        "export SIGNATURE=sha256",
        "X_AMZ_SIGNATURE: AWS4-HMAC-SHA256",
        "https://github.com/a/hooks/tree/main",
        "https://h/docs/webhooks/",
    ),
    *("export OMP_NUM_THREADS=8 TORCH_CUDA_ARCH_LIST='8.0;9.0'", "ulimit -n 65536", "unset PASS"),
    *("sshpass -e ssh h", "sshpass -f ~/.pw ssh h", "redis-cli -p 6379 ping", "unzip a1.zip -d b"),
    *('["docker", "run", "-p", "8080:80"]', '["docker", "login", "-u", "bob", "reg.io"]'),
    *(
        '["curl", "-u", "$USER:$PW"]',
        '["mysql", "-p", "db"]',
    ),
    *("tokens_per_second: 12034.5", "tokenizer: gpt2", "max_tokens: 512", "tokens=1048576"),
    *("export HF_TOKEN=${HF_TOKEN:-}", 'export HF_TOKEN="${HF_TOKEN-}"', "HF_TOKEN+=$MORE"),
    "export HF_TOKEN=${HF_TOKEN:-$(cat ~/.hf)}",
    """export WANDB_API_KEY=$(python -c "print(open('x').read())")""",
    *("SORT_KEY=length", "CACHE_KEY=v1-2024", "SSH_PUBLIC_KEY='ssh-ed25519 AAAAC3NzaC1lZDI1'"),
    *("FIRST_PASS=1", "num_pass=2", "export SPLIT_TOKEN=doc", "BYPASS=1", "compass: north"),
    *("sk-learn-models-2024-abcdef", "hf_datasetscachedir", "read -s HF_TOKEN < ~/.hf"),
    *("setenv HF_TOKEN $X", "rclone copy a1 b1", "export HF_TOKEN=$(cat <<< $X)", "mc cp a1 b1"),
    *("curl -H 'Authorization: Bearer $TOKEN' x", 'curl -H "X-Api-Key: $KEY" https://x'),
    *("https://user@bitbucket.org/a/b", "https://dev-user-2024-long@dev.azure.com/o/p"),
    # Placeholders, for servers that ask for no key, or to be replaced.
    *("export OPENAI_API_KEY=EMPTY", "export OPENAI_API_KEY='dummy'", "OPENAI_API_KEY=none x"),
    *("OPENAI_API_KEY=sk-no-key-required", "export VLLM_API_KEY=token-abc123", "--api-key EMPTY"),
    *("export HF_TOKEN=YOUR_TOKEN_HERE", "HF_TOKEN=hf_" + "x" * 34, "WANDB_API_KEY=XXXXXXXX"),
    *(
        "PASSWORD=changeme",
        "WANDB_API_KEY=... is missing",
        "api_key: your-api-key",
        "x --token xxxx",
    ),
    *(
        "API_KEY=not-needed",
        "export API_KEY=dummy-key",
        "https://u:changeme@h/x",
        "PASSWORD=CHANGE_ME",
    ),
    # Patterns and formats, and files that are read.
    *(
        'sed -i "s/PASSWORD=.*/PASSWORD=$PW/" .env',
        'sed -i "s/^token = .*/token = $TOKEN/" ~/x.toml',
    ),
    r"sed -E 's/(API_KEY=)[^ ]+/\1/' x; grep -E 'PASSWORD=\S+' x",
    r'printf "machine x login u password %s\n" "$WANDB_API_KEY" > ~/.netrc',
    r'printf "machine x\n  login user\n  password %s\n" "$WANDB_API_KEY" > ~/.netrc',
    "apptainer registry login --username me --password-stdin docker://ghcr.io < $HOME/.ghcr",
    *("docker login --password-stdin ghcr.io < $PW", "docker login --password-stdin < $X/ghcr"),
    # Names of data, of jobs and of a shell's own.
    *("DATA_KEY=train_v2", "GROUP_KEY=repo2", "MODEL_KEY=llama3-8b", "export DATASET_KEY=c4_en2"),
    *(
        "export SLURM_KEY=x1",
        "I_MPI_HYDRA_KEY=a1",
        "MPI_JOB_KEY=42",
        "lmod_token=gcc12 module load x",
    ),
    # Topics of a forum, a percent sign.
    "https://discuss.example/t/how-to-train-llama-3-on-2-gpus-in-2026/12345",
    "curl 'https://h/x?user=a%20b&c=1'",
    *("time_limit: 02:00:00", "nodes: n[01-16]", "--gres=gpu:h100:8", "--constraint=a100&ib"),
)


REPEATED = (
    *("curl -u ", "docker login ", "--from-literal=", "--from-literal a", "echo a | "),
    *("sqlplus ", "mysql -", "redis-cli ", "https://", "u", "ldapsearch ", "sshpass "),
)


def with_value(key: str, value: Any) -> str:
    """A run file in which a key has a value."""
    data: Any = yaml.safe_load(BASE)
    *parents, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    below = data
    for part, following in zip(parents, [*parents[1:], last][: len(parents)], strict=True):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(below, list):
            below.extend([empty] if not below else [])
        else:
            below.setdefault(part, empty)
        below = below[part]
    below[last] = value
    return yaml.safe_dump(data, sort_keys=False)


def test_each_secret_is_refused_at_its_place_and_quoted_nowhere(tmp_path: Path) -> None:
    wrong = []
    for key, value in BAD:
        for is_override in (False, True):
            text = BASE if is_override else with_value(key, value)
            words = [f"{key}={json.dumps(value)}"] if is_override else []
            try:
                path = tmp_path / "run.yaml"
                path.write_text(text)
                load_run_file(path, words)
                wrong.append((key, value, "is taken"))
                continue
            except ConfigErrors as error:
                said = str(error)
            place = f"command line {key}" if is_override else f"{path}:"
            leaks = [part for part in (PW, HF, GITHUB, HEX, "a1a1a1", "1a1a1a") if part in said]
            if (
                leaks
                or place not in said
                or key not in said
                or not re.search("copies this file into|shown and kept|shows and copies", said)
            ):
                wrong.append((key, value, said))
    assert not wrong, "\n".join(map(str, wrong))


def test_what_is_no_secret(tmp_path: Path) -> None:
    assert [text for text in (*GOOD, *GOOD_LINES) if any(secrets_in(text))] == []
    args = ["--tokenizer", "gpt2", "-p", "8080", "-u", "me:users", "docker login", "cp -p a1 b"]
    good = tmp_path / "good.yaml"
    good.write_text(with_value("clusters.0.environment.container", {"image": "i", "extra": args}))
    load_run_file(good, [])
    variables = {
        "SORT_KEY": "length",
        "CACHE_KEY": "v1-2024",
        "SSH_PUBLIC_KEY": "ssh-ed25519 AAAA1",
    }
    variables |= {"FIRST_PASS": "1", "SPLIT_TOKEN": "doc", "NAME": "sk-learn-models-2024-abcdef"}
    lines = [line for line in GOOD_LINES if "export" in line or "curl" in line]
    given = {"environment": {"variables": variables, "setup": lines}, "gpus_per_node": 1}
    variables |= {"DATA_KEY": "train_v2", "VLLM_API_KEY": "EMPTY", "HF_TOKEN": "hf_xxxxxxxx"}
    variables |= {"MODEL_KEY": "llama3-8b", "OPENAI_API_KEY": "sk-no-key-required"}
    good.write_text(with_value("clusters", [{"launcher": {"kind": "slurm"}, **given}]))
    load_run_file(good, [])
    texts = [*ROOT.glob("examples/*/*.yaml"), *ROOT.glob("src/isles/config/templates/*.yaml")]
    assert len(texts) > 8
    lines = {line for path in texts for line in path.read_text().splitlines()}
    lines |= {x for path in ROOT.glob("docs/*.md") for x in path.read_text().splitlines()}
    assert [line for line in lines if any(secrets_in(line))] == []


def test_each_kind_of_secret_is_refused_as_a_line_and_taken_out_of_a_report(tmp_path: Path) -> None:
    wrong = []
    for line in BAD_LINES:
        (fault,) = faults(tmp_path, with_value("clusters.0.environment.setup", [line])) or (None,)
        gap = without_secrets(line)
        redacted = Redactor(())(line)
        for said in (str(fault), gap, redacted):
            if PW in said or HEX in said or line in said:
                wrong.append((line, said))
        if (
            fault is None
            or "contains a secret" not in str(fault)
            or Redactor(())(redacted) != redacted
        ):
            wrong.append((line, fault, redacted))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_long_line_of_one_word_takes_no_longer_than_others() -> None:
    # Not timed: with quadratic patterns, these would take minutes.
    for text in REPEATED:
        list(secrets_in(f"curl -{text * ((64 << 10) // len(text))}"))
    list(secrets_in("wandb login" + " --host" * 200))
    list(secrets_in("htpasswd -" + "b" * (64 << 10)))
    words = ["docker", "login", "-p", "a1"] * 9_000
    data = {"training": {"script_args": words}}
    errors = secret_errors(data, [], {}, "", "run.yaml")
    assert len(errors) == 9_000


def test_the_fix_of_a_refused_value_says_what_may_stand_there(tmp_path: Path) -> None:
    environment = "clusters.0.environment"
    for text in ("$HF_TOKEN", "${HF_TOKEN}"):
        (fault,) = faults(tmp_path, with_value(f"{environment}.variables", {"HF_TOKEN": text}))
        assert "nothing expands $NAME" in str(fault.fix) and fault.where.endswith(".HF_TOKEN")
    for key, value in (("variables", {"HF_TOKEN": PW}), ("setup", [f"export HF_TOKEN={PW}"])):
        (fault,) = faults(tmp_path, with_value(f"{environment}.{key}", value))
        assert "write EMPTY" in str(fault.fix)


def test_an_unknown_option_is_named_without_its_secret(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((f"--hf_token={HF}",), ("--hf-token", PW), (f"--x={GITHUB}",), (f"wandb-{HF}",)):
        assert main(["version", *words])
        said = capsys.readouterr().err
        assert not any(part in said for part in (HF, PW, GITHUB)), said
        assert main(["render", "run.yaml", "--to", "sbatch", *words])
        said = capsys.readouterr().err
        assert not any(part in said for part in (HF, PW, GITHUB)), said


def test_a_comment_and_a_line_that_is_no_yaml(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, f"{BASE}# hub: https://u:{PW}@host\n")
    assert fault.where.endswith("run.yaml:4") and PW not in str(fault)
    for text in (f"name: 'x\nexport HF_TOKEN={HF}\n", f"{HF}\n", f"a: {HF}: b\n", f"[{HF}\n"):
        assert HF not in str(faults(tmp_path, text)), text
    for word in (f"x.y.z {HF}", f"name.x={HF}", f"{HF}=1", f"data.sources.7.path={HF}"):
        assert HF not in str(faults(tmp_path, BASE, word)), word


def test_an_old_run_that_has_one_is_shown_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"export WANDB_API_KEY={HEX} # https://u:{PW}@host {HF}"
    shown = without_secrets(text)
    assert shown == "export WANDB_API_KEY=[removed] # https://u:[removed]@host [removed]"
    assert main(["plan", str(tmp_path / f"{HF}.yaml")]) == 1
    assert HF not in capsys.readouterr().err
