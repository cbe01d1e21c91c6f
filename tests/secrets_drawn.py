"""Secrets and identities as they stand in command lines, drawn from seeds.

No value here has the form of a secret: each is assembled from parts and random draws. The kinds
were written down before the rules of `kprof.report.redaction`; those held out were not used while
the rules were written.
"""

import base64
import json
import random
import string
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote

FIRST_NAMES = [
    "anke",
    "bjorn",
    "chidi",
    "dalia",
    "emeka",
    "farah",
    "goran",
    "hiroko",
]
LAST_NAMES = [
    "okafor",
    "lindqvist",
    "baranov",
    "tanaka",
    "moreau",
    "haddad",
    "castillo",
    "weiss",
]
COMPANIES = [
    "acmelabs",
    "northwind",
    "borealis",
    "quantile",
    "hexafly",
    "tessera",
    "lumio",
    "vantablock",
]
WORDS = [
    "river",
    "copper",
    "violet",
    "anchor",
    "saddle",
    "meadow",
    "cactus",
    "ribbon",
]
FRAMES = (
    "python train.py {} --lr 1e-4",
    "vllm serve meta-llama/Llama-3.1-8B {} --max-num-seqs 256",
    "torchrun --nproc-per-node 8 train.py {} --batch-size 32",
    "python -m sglang.launch_server {} --tp 2",
    "accelerate launch finetune.py {} --seed 17",
)
ENVIRONMENT_FRAMES = (
    "{} python train.py --lr 1e-4",
    "env {} torchrun --nproc-per-node 8 train.py",
    "export {} && python serve.py --port 8000",
    "docker run --gpus all -e {} image:latest python train.py",
)


class Drawn(NamedTuple):
    """One text of a kind and the parts of it that redaction must hide."""

    kind: str
    text: str
    hidden: tuple[str, ...]


class Source(random.Random):
    """Draws the parts of secrets and identities."""

    def chars(self, count, alphabet=string.ascii_letters + string.digits):
        return "".join(self.choice(alphabet) for _ in range(count))

    def hexadecimal(self, count):
        return self.chars(count, "0123456789abcdef")

    def upper(self, count):
        return self.chars(count, string.ascii_uppercase + string.digits)

    def lower(self, count):
        return self.chars(count, string.ascii_lowercase + string.digits)

    def base64(self, size):
        return base64.b64encode(self.randbytes(size)).decode()

    def url_base64(self, size):
        return base64.urlsafe_b64encode(self.randbytes(size)).decode().rstrip("=")

    def uuid(self):
        return "-".join(self.hexadecimal(count) for count in (8, 4, 4, 4, 12))

    def password(self):
        return self.choice(
            (
                lambda: self.choice(WORDS).title() + str(self.randrange(100, 9999)) + "!",
                lambda: self.choice(WORDS) + self.choice("-_.") + self.choice(WORDS) + "7",
                lambda: self.chars(14),
                lambda: self.choice(WORDS) + str(self.randrange(10, 99)),
            )
        )()

    def person(self):
        return self.choice(FIRST_NAMES), self.choice(LAST_NAMES)

    def user(self):
        first, last = self.person()
        return self.choice((first[0] + last, first + "." + last, last + str(self.randrange(9))))

    def company(self):
        return self.choice(COMPANIES)

    def node(self):
        name = self.choice(("node", "gpu", "dgx", "worker", "train", "hgx"))
        return f"{name}{self.choice(('', '-'))}{self.randrange(1, 400):03d}"

    def host(self):
        return f"{self.node()}.{self.company()}.{self.choice(('com', 'net', 'internal', 'local'))}"

    def ipv4(self):
        first = self.choice((10, 172, 192, 34, 52, 203))
        return f"{first}." + ".".join(str(self.randrange(2, 254)) for _ in range(3))

    def mac(self, between=":"):
        return between.join(self.hexadecimal(2) for _ in range(6))

    def sentence(self):
        start = self.choice(("Summarise the merger of", "Write a letter to", "Tell me about"))
        first, last = self.person()
        return (
            f"{start} {first.title()} {last.title()} and {self.company()} in {self.choice(WORDS)}"
        )

    def framed(self, argument):
        return self.choice(FRAMES).format(argument)

    def environment(self, assignment):
        return self.choice(ENVIRONMENT_FRAMES).format(assignment)


Draw = Callable[[Source], tuple[str, ...]]


def option(name, value, between=" ") -> Draw:
    """Return a draw of a command whose option `name` has a hidden value."""

    def draw(s):
        hidden = value(s)
        return s.framed(f"{name}{between}{hidden}"), hidden

    return draw


def variable(name, value) -> Draw:
    """Return a draw of a command before which the variable `name` is set."""

    def draw(s):
        hidden = value(s)
        return s.environment(f"{name}={hidden}"), hidden

    return draw


def bare(value) -> Draw:
    """Return a draw of a command with the hidden value as an argument of no telling name."""

    def draw(s):
        hidden = value(s)
        return s.framed(f"--extra {hidden}"), hidden

    return draw


def around(template, *values) -> Draw:
    """Return a draw of `template` with each hidden value in its place."""

    def draw(s):
        hidden = tuple(value(s) for value in values)
        return template.format(*hidden), *hidden

    return draw


def jwt(s):
    head = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "typ": "JWT"}).encode())
    body = base64.urlsafe_b64encode(
        json.dumps({"sub": s.user(), "iat": s.getrandbits(30)}).encode()
    )
    return ".".join((head.decode().rstrip("="), body.decode().rstrip("="), s.url_base64(32)))


def pem(s, newline, of=""):
    body = s.base64(432)
    lines = [body[at : at + 64] for at in range(0, len(body), 64)]
    edge = "-" * 5
    first = f"{edge}BEGIN {of}PRIVATE" + f" KEY{edge}"
    last = f"{edge}END {of}PRIVATE" + f" KEY{edge}"
    return newline.join((first, *lines, last)), (lines[0], lines[3], lines[-2])


def pem_argument(s):
    text, lines = pem(s, "\\n")
    return f"python train.py --gcs-key '{text}' --lr 1", *lines


def pem_lines(s):
    text, lines = pem(s, "\n", of="RSA ")
    return f"env DEPLOY='{text}' python train.py", *lines


def presigned(s):
    key = "AK" + "IA" + s.upper(16)
    signature = s.hexadecimal(64)
    url = (
        f"https://{s.company()}.s3.amazonaws.com/data.tar?X-Amz-Algorithm=AWS4-HMAC-SHA256"
        f"&X-Amz-Credential={key}%2F20260101%2Fus-east-1%2Fs3%2Faws4_request"
        f"&X-Amz-Expires=3600&X-Amz-Signature={signature}"
    )
    return f"python train.py --data '{url}'", key, signature


def service_account(s):
    key = s.hexadecimal(40)
    text, lines = pem(s, "\\n")
    told = json.dumps({"type": "service_account", "private_key_id": key}).rstrip("}")
    return f'python train.py --gcp \'{told}, "private_key": "{text}"}}\'', key, *lines


def environment_dump(s):
    password, token = s.password(), s.chars(32)
    held = {"PATH": "/usr/bin", "DB_PASSWORD": password, "INTERNAL_TOKEN": token, "OMP": "8"}
    return json.dumps(held), password, token


def environment_repr(s):
    password, key = s.password(), s.chars(24)
    return str({"HOME": "/root", "REDIS_PASSWD": password, "LICENSE_KEY": key}), password, key


def json_option(s):
    key = s.chars(28)
    return s.framed("--logger '" + json.dumps({"kind": "x", "api_key": key}) + "'"), key


def nested_json(s):
    token = s.chars(30)
    inner = json.dumps(json.dumps({"auth": {"access_token": token}}))
    return s.framed(f"--override {inner}"), token


def shell_string(s):
    token, password = s.chars(30), s.password()
    told = f"export SERVICE_TOKEN={token}; python train.py --db-password={password} --lr 1"
    return f'bash -c "{told}"', token, password


def shell_escaped(s):
    password = s.password()
    return f'bash -lc "python serve.py --admin-password \\"{password}\\" --port 80"', password


def continued_line(s):
    key = s.chars(26)
    return f"python train.py \\\n  --api-key \\\n    {key} \\\n  --lr 1e-4", key


def quoted_passphrase(s):
    phrase = " ".join(s.sample(WORDS, 4))
    return s.framed(f'--passphrase "{phrase}"'), phrase


def percent_encoded(s):
    password = s.choice(WORDS) + "@/:" + s.chars(8)
    return s.framed(f"--db postgresql://app:{quote(password, safe='')}@db:5432/x"), quote(
        password, safe=""
    )


def encoded_query(s):
    token = s.chars(32)
    return s.framed(f"--callback https%3A%2F%2Fhooks%2Fin%3Ftoken%3D{token}%26x%3D1"), token


def basic_header(s):
    told = base64.b64encode(f"{s.user()}:{s.password()}".encode()).decode()
    return f"curl -H 'Authorization: Basic {told}' http://localhost:8000/v1", told


def curl_user(s):
    user, password = s.user(), s.password()
    return f"curl -u {user}:{password} http://localhost:8000/v1/models", password


def url_userinfo(s):
    user, password = s.user(), s.password()
    return s.framed(f"--data https://{user}:{password}@files.example.com/a.tar"), password


def proxy(s):
    password = s.password()
    return s.environment(f"https_proxy=http://{s.user()}:{password}@proxy:3128"), password


def netrc(s):
    password = s.chars(18)
    return f"machine api.example.com login {s.user()} password {password}", password


def odbc(s):
    password = s.password()
    return s.framed(f'--sql "Server=db,1433;Database=x;User Id=sa;Password={password};"'), password


def from_literal(s):
    password = s.password()
    return f"kubectl create secret generic db --from-literal=password={password}", password


def docker_login(s):
    password = s.password()
    return f"docker login -u builder -p {password} registry.example.com", password


def mysql(s):
    password = s.password()
    return f"mysql -h db -u root -p{password} runs", password


def sshpass(s):
    password = s.password()
    return f"sshpass -p {password} ssh worker nvidia-smi", password


def redis_cli(s):
    password = s.password()
    return f"redis-cli -h cache -a {password} ping", password


def cookie(s):
    session = s.url_base64(24)
    return f"curl --header 'Cookie: theme=dark; sessionid={session}' http://localhost", session


def azure_storage(s):
    key = s.base64(64)
    told = f"DefaultEndpointsProtocol=https;AccountName=runs;AccountKey={key};"
    return s.framed(f"--storage '{told}EndpointSuffix=core.windows.net'"), key


def azure_sas(s):
    signature = quote(s.base64(32), safe="")
    url = f"https://runs.blob.core.windows.net/c?sv=2022-11-02&sp=r&sig={signature}"
    return s.framed(f"--data '{url}'"), signature


def hidden_in_argv(s):
    key = s.chars(24)
    return str(["python", "train.py", "--secret-key", key, "--lr", "1"]), key


def json_argv(s):
    password = s.password()
    return json.dumps(["python", "train.py", "--password", password, "--lr", "1"]), password


SECRETS: dict[str, Draw] = {
    "option api-key": option("--api-key", lambda s: s.chars(20)),
    "option token=": option("--token", lambda s: s.chars(24), "="),
    "option password": option("--password", Source.password),
    "option secret": option("--client-secret", Source.password, "="),
    "option with underscores": option("--wandb_api_key", lambda s: s.hexadecimal(40)),
    "variable HF_TOKEN": variable("HF_TOKEN", lambda s: "hf_" + s.chars(34)),
    "variable password": variable("POSTGRES_PASSWORD", Source.password),
    "variable AWS secret": variable("AWS_SECRET_ACCESS_KEY", lambda s: s.base64(30)),
    "AWS access key": bare(lambda s: "AK" + "IA" + s.upper(16)),
    "GCP API key": bare(lambda s: "AI" + "za" + s.url_base64(27)[:35]),
    "GCP service account": service_account,
    "GitHub token": bare(lambda s: "gh" + s.choice("pousr") + "_" + s.chars(36)),
    "GitLab token": bare(lambda s: "glpat" + "-" + s.url_base64(15)),
    "Hugging Face token": bare(lambda s: "hf_" + s.chars(34)),
    "OpenAI key": bare(lambda s: "sk-" + "proj-" + s.chars(74) + "T3BlbkFJ" + s.chars(74)),
    "Anthropic key": bare(lambda s: "sk-" + "ant-api03-" + s.url_base64(69) + "AA"),
    "W&B key": around("wandb login {}", lambda s: s.hexadecimal(40)),
    "Slack token": bare(lambda s: "xoxb-" + "-".join((s.chars(12), s.chars(12), s.chars(24)))),
    "Stripe key": bare(lambda s: "sk_" + "live_" + s.chars(24)),
    "PyPI token": bare(lambda s: "pypi-" + "AgEIcHlwaS5vcmc" + s.url_base64(60)),
    "JWT": bare(jwt),
    "PEM in an argument": pem_argument,
    "presigned S3 URL": presigned,
    "URL with a password": url_userinfo,
    "URL with a token": around(
        "python train.py --data 'https://files.example.com/a?x=1&access_token={}'",
        lambda s: s.chars(32),
    ),
    "Bearer header": around(
        "curl -H 'Authorization: Bearer {}' http://localhost:8000", lambda s: s.chars(40)
    ),
    "API key header": around(
        "curl -H 'X-API-Key: {}' http://localhost:8000/v1", lambda s: s.chars(32)
    ),
    "database URL": around(
        "python train.py --tracker mysql+pymysql://mlflow:{}@db:3306/runs", Source.password
    ),
    "ODBC string": odbc,
    "Azure storage key": azure_storage,
    "environment as JSON": environment_dump,
    "option with JSON": json_option,
    "shell string": shell_string,
    "continued line": continued_line,
    "docker login": docker_login,
    "curl user": curl_user,
    "Hydra override": around("python train.py trainer.logger.api_key={} lr=1", Source.password),
    "argument list": hidden_in_argv,
    "random argument": bare(lambda s: s.chars(40)),
    "random base64": bare(lambda s: s.base64(32)),
    "NVIDIA API key": bare(lambda s: "nvapi-" + s.url_base64(48)),
    "Databricks token": bare(lambda s: "dapi" + s.hexadecimal(32)),
    "SendGrid key": bare(lambda s: "SG." + s.url_base64(16) + "." + s.url_base64(32)),
    "Docker token": bare(lambda s: "dckr_" + "pat_" + s.url_base64(20)),
    "proxy": proxy,
    "Vault token": bare(lambda s: "hvs." + s.url_base64(69)),
}

HELD_OUT_SECRETS: dict[str, Draw] = {
    "option apiKey": option("--apiKey", lambda s: s.chars(22)),
    "option passwd=": option("--db-passwd", Source.password, "="),
    "option auth": option("--auth-token", Source.password),
    "option credential": option("--credentials", Source.password),
    "option passphrase": quoted_passphrase,
    "option private key": option("--private-key", lambda s: s.base64(32)),
    "option pwd": option("--redis-pwd", Source.password),
    "variable API key": variable("COHERE_API_KEY", lambda s: s.chars(40)),
    "variable secret": variable("MINIO_ROOT_PASSWORD", Source.password),
    "variable pass": variable("MONGO_PASS", Source.password),
    "lower-case variable": variable("service_token", lambda s: s.lower(20)),
    "access token option": option("--hf_access_token", lambda s: s.chars(24), "="),
    "AWS session token": variable("AWS_SESSION_TOKEN", lambda s: s.base64(150)),
    "AWS temporary key": bare(lambda s: "AS" + "IA" + s.upper(16)),
    "GCP OAuth token": bare(lambda s: "ya29" + "." + s.url_base64(90)),
    "GitHub fine-grained token": bare(
        lambda s: "github_" + "pat_" + s.chars(22) + "_" + s.chars(59)
    ),
    "GitLab runner token": bare(lambda s: "glrt" + "-" + s.url_base64(15)),
    "Git over HTTPS": around(
        "git clone https://x-access-token:{}@github.com/a/b.git", lambda s: s.chars(36)
    ),
    "older OpenAI key": bare(lambda s: "sk-" + s.chars(48)),
    "Groq key": bare(lambda s: "gsk_" + s.chars(52)),
    "Replicate token": bare(lambda s: "r8_" + s.chars(37)),
    "npm token": bare(lambda s: "npm_" + s.chars(36)),
    "Slack webhook": around(
        "python train.py --notify https://hooks.slack.com/services/{}",
        lambda s: "/".join(("T" + s.upper(8), "B" + s.upper(10), s.chars(24))),
    ),
    "Discord webhook": around(
        "python train.py --notify https://discord.com/api/webhooks/118273645/{}",
        lambda s: s.url_base64(51),
    ),
    "Telegram bot": around(
        "python train.py --notify bot{}", lambda s: f"{s.randrange(10**9)}:AA" + s.url_base64(25)
    ),
    "Stripe restricted key": bare(lambda s: "rk_" + "test_" + s.chars(24)),
    "Twilio key": bare(lambda s: "SK" + s.hexadecimal(32)),
    "Sentry DSN": around(
        "python train.py --dsn https://{}@o12.ingest.sentry.io/42", lambda s: s.hexadecimal(32)
    ),
    "DigitalOcean token": bare(lambda s: "dop_" + "v1_" + s.hexadecimal(64)),
    "Azure client secret": bare(lambda s: s.chars(3) + "8Q~" + s.url_base64(24)),
    "Azure SAS": azure_sas,
    "PEM over lines": pem_lines,
    "SSH key": bare(lambda s: "AAAAB3NzaC1yc2E" + s.base64(120)),
    "Redis URL": around("python serve.py --broker redis://:{}@cache:6379/0", Source.password),
    "MongoDB URL": around(
        "python train.py --db mongodb+srv://runs:{}@cluster0.example.net", Source.password
    ),
    "percent-encoded password": percent_encoded,
    "percent-encoded query": encoded_query,
    "Basic header": basic_header,
    "cookie": cookie,
    "netrc": netrc,
    "environment as Python": environment_repr,
    "JSON in JSON": nested_json,
    "escaped quotes": shell_escaped,
    "argument list as JSON": json_argv,
    "Kubernetes secret": from_literal,
    "MySQL password": mysql,
    "sshpass": sshpass,
    "redis-cli": redis_cli,
    "Helm value": around("helm install x y --set auth.adminPassword={}", Source.password),
    "YAML": around("model: llama\ndatabase:\n  password: {}\n", Source.password),
    "package index": around(
        "pip install --index-url https://ci:{}@pypi.example.com/simple kprof", Source.password
    ),
    "random hexadecimal": bare(lambda s: s.hexadecimal(64)),
    "LangSmith key": bare(lambda s: "lsv2_" + "pt_" + s.hexadecimal(32) + "_" + s.hexadecimal(10)),
    "Grafana token": bare(lambda s: "glsa_" + s.chars(32) + "_" + s.hexadecimal(8)),
    "Kaggle key": variable("KAGGLE_KEY", lambda s: s.hexadecimal(32)),
    "Modal token": around(
        "modal token set --token-id {} --token-secret {}",
        lambda s: "ak-" + s.chars(22),
        lambda s: "as-" + s.chars(22),
    ),
}


def home(form):
    def draw(s):
        user = s.user()
        return s.framed("--out " + form.format(user)), user

    return draw


def messages(s):
    told = s.sentence()
    return s.framed("--messages '" + json.dumps([{"role": "user", "content": told}]) + "'"), told


def cluster_name(s):
    company = s.company()
    return s.framed(f"--scheduler {s.node()}.{company}.svc.cluster.local:8786"), company


def hosts(s):
    first, second = s.node(), s.node()
    return f"mpirun -np 16 -H {first}:8,{second}:8 python train.py", first, second


def endpoint(s):
    host = s.node()
    return f"torchrun --nnodes 2 --rdzv-endpoint={host}:29400 train.py", host


def ssh(s):
    user, host = s.user(), s.node()
    return f"ssh {user}@{host} nvidia-smi", user, host


def scp(s):
    user, host = s.user(), s.host()
    return f"scp run.kprof {user}@{host}:/data/runs", user, host


def node_list(s):
    name = s.company()
    return s.environment(f"SLURM_JOB_NODELIST={name}-[001-004,017]"), name


IDENTITIES: dict[str, Draw] = {
    "e-mail": option("--notify", lambda s: f"{s.user()}@{s.company()}.com"),
    "home": home("/home/{}/runs/a"),
    "home of macOS": home("/Users/{}/runs/a"),
    "USER": variable("USER", Source.user),
    "IPv4": option("--master-addr", Source.ipv4),
    "IPv4 with a port": around("python train.py --init tcp://{}:29500", Source.ipv4),
    "IPv6": bare(lambda s: "fd00:" + ":".join(s.hexadecimal(4) for _ in range(3)) + "::1"),
    "full IPv6": bare(lambda s: ":".join(s.hexadecimal(4) for _ in range(8))),
    "MAC": bare(Source.mac),
    "GPU UUID": variable("CUDA_VISIBLE_DEVICES", lambda s: "GPU-" + s.uuid()),
    "host with a domain": option("--server", Source.host),
    "MASTER_ADDR": variable("MASTER_ADDR", Source.node),
    "ssh": ssh,
    "rendezvous": endpoint,
    "prompt": around('python generate.py --prompt "{}"', Source.sentence),
    "messages": messages,
    "Slurm nodes": node_list,
    "ARN": around(
        "python train.py --role arn:aws:iam::{}:role/train", lambda s: s.chars(12, "123456789")
    ),
    "cluster service": cluster_name,
    "HOSTNAME": variable("HOSTNAME", Source.node),
    "AWS host": bare(lambda s: "ip-" + s.ipv4().replace(".", "-") + ".ec2.internal"),
    "W&B entity": option("--wandb-entity", Source.company),
    "Slurm account": around("srun --account={} python train.py", Source.company),
    "user option": option("--user", Source.user),
}

HELD_OUT_IDENTITIES: dict[str, Draw] = {
    "e-mail in a list": around(
        "python train.py --cc a@example.com,{}", lambda s: f"{s.user()}+gpu@{s.company()}.co.uk"
    ),
    "home of Windows": home("C:\\Users\\{}\\runs"),
    "home on a share": home("/mnt/home/{}/runs"),
    "scratch": home("/scratch/users/{}/a.pt"),
    "home by tilde": home("~{}/runs"),
    "LOGNAME": variable("LOGNAME", Source.user),
    "IPv4 in a URL": around("vllm bench serve --base-url http://{}:8000/v1", Source.ipv4),
    "IPv6 in brackets": around(
        "python serve.py --url http://[{}]:8000",
        lambda s: "2001:db8:" + s.hexadecimal(4) + "::" + s.hexadecimal(4),
    ),
    "MAC with hyphens": bare(lambda s: s.mac("-").upper()),
    "MIG UUID": variable("CUDA_VISIBLE_DEVICES", lambda s: "MIG-" + s.uuid()),
    "host in a URL": around("curl https://{}/v1/models", Source.host),
    "hosts of mpirun": hosts,
    "scp": scp,
    "rsync": around("rsync -a runs {}:/data", lambda s: f"{s.user()}@{s.node()}.{s.company()}.net"),
    "short prompt": around("llama-cli -m model.gguf -p '{}'", Source.sentence),
    "system prompt": around('python serve.py --system-prompt="{}" --port 1', Source.sentence),
    "SLURMD_NODENAME": variable("SLURMD_NODENAME", Source.node),
    "ECR": around(
        "docker run {}.dkr.ecr.us-east-1.amazonaws.com/train:1 python train.py",
        lambda s: s.chars(12, "123456789"),
    ),
    "pod": variable("POD_NAME", lambda s: f"{s.company()}-{s.lower(10)}-{s.lower(5)}"),
    "namespace": option("--namespace", Source.company),
    "Ray address": around("python train.py --address ray://{}:10001", Source.node),
    "Windows account": bare(lambda s: f"CORP\\{s.user()}"),
    "author": around('python train.py --author "{}"', lambda s: " ".join(s.person()).title()),
    "telephone": option("--call", lambda s: f"+49-151-{s.chars(8, string.digits)}"),
    "file share": around("mount -t nfs {}:/export /mnt", Source.host),
    "subscription": option("--subscription", Source.uuid),
}

# Written after the rules, to break them: places where a secret or an identity stands.
PLACES_OF_SECRETS = (
    "PGPASSWORD={} psql -h db",
    "python -c \"os.environ['SECRET_TOKEN'] = '{}'; main()\"",
    "srun --export=ALL,HF_TOKEN={} python t.py",
    "python t.py db.pass={} lr=1",
    "python t.py +db.credentials.pwd={}",
    "- name: DB_PASSWORD\n  value: {}",
    "[{{'name': 'API_KEY', 'value': '{}'}}]",
    "setenv DB_PASSWORD {}",
    "fish -c 'set -x DB_PASSWORD {}'",
    "aws configure set aws_secret_access_key {}",
    "curl -H 'PRIVATE-TOKEN: {}' http://h",
    "smbclient //h/s -U bob%{}",
    "ldapsearch -D cn=a -w {}",
    "lftp -u bob,{} h",
    "mc alias set m http://h name {}",
    "echo {} | sudo -S nvidia-smi",
    "keytool -storepass {} -list",
    "nsys profile -e DB_PASSWORD={} python t.py",
    "%22api_key%22%3A%22{}%22",
    "Namespace(lr=1, api_key='{}', seed=1)",
    '$env:API_KEY="{}"; python t.py',
    'zsh -c "HF_TOKEN={} exec python t.py --lr 1"',
    "jdbc:postgresql://db/x?user=u&password={}",
    "rsync rsync://u:{}@h/m",
    "psql postgresql://u:a@{}@db/x",
    "[db]\npassword = {}\nuser=x",
)
PLACES_OF_IDENTITIES = (
    "sudo -u {} python t.py",
    "su - {} -c 'python t.py'",
    "chown {}:users f",
    "ssh {} nvidia-smi",
    "scp a {}:/tmp",
    "rsync -a x {}:/tmp/y",
    "docker pull registry.{}.com:5000/ml/train:1",
    "aws s3 cp s3://{}-data/x .",
    "gcloud config set project {}",
    "srun -A {} python t.py",
    "srun -w {} python t.py",
    "deepspeed --include {}:0,1 t.py",
    "kubectl exec -n {} pod -- python t.py",
    "git config user.name '{}'",
    "git commit --author='Jane <j@{}.io>'",
    "llama-cli --system 'You are {} bot'",
    "ollama run llama3 'Tell me of {} Corp'",
    'curl -d \'{{"prompt": "{} deal", "n": 7}}\' http://localhost/v1',
    "PYTHONPATH=/home/{}/a:/opt/b python t.py",
    "python t.py --run-name {}-x --out /home/{}/x",
    "hostname: {}",
    '{{"host": "{}"}}',
    "MLFLOW_TRACKING_URI=http://mlflow.{}",
    "{}@gpu7:~$ python t.py",
)


def drawn(kinds: dict[str, Draw], each: int = 3) -> list[Drawn]:
    """Return `each` texts of every kind, the same at every call."""
    return [
        Drawn(kind, text, tuple(hidden))
        for kind, draw in kinds.items()
        for seed in range(each)
        for text, *hidden in (draw(Source(f"{kind} {seed}")),)
    ]
