#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""secrets.py - words of a command line with a secret in each, in the forms that issuers document.

secrets.py words: the words, one a line.  secrets.py find FILE...: the secrets that are in the files; exit code 1 if any.
The secrets are put together here, so that nothing in this tree looks like one.
"""
import sys

BODY = "aB3dE5fG7hJ9kL1mN2pQ4rS6tU8vW0xYzC" * 4
HEX = "0f1e2d3c4b5a69788796a5b4c3d2e1f0" * 2

# Tokens whose beginning says what they are: beginning, length of the rest.
TOKENS = [("hf_", 34), ("sk-", 48), ("sk-proj-", 60), ("sk-ant-api03-", 80), ("ghp_", 36), ("gho_", 36), ("ghs_", 36),
          ("github_pat_", 82), ("glpat-", 20), ("gldt-", 20), ("xoxb-", 40), ("xoxp-", 40), ("xapp-1-", 40), ("AIza", 35),
          ("ya29.", 60), ("GOCSPX-", 28), ("npm_", 36), ("pypi-AgEIcHlwaS5vcmc", 60), ("nvapi-", 64), ("dckr_pat_", 27),
          ("sk_" + "live_", 24), ("rk_" + "live_", 24), ("hvs.", 90), ("glsa_", 40), ("lin_api_", 40), ("gsk_", 52), ("glimt-", 25),
          ("glagent-", 50), ("glft-", 25), ("glffct-", 20), ("glrtr-", 27), ("ABSK", 110), ("LTAI", 20), ("AKLT", 20), ("AKID", 32),
          ("AKCp", 69), ("ATBB", 32), ("ATCTT3", 60), ("KGAT_", 32), ("tgp_v1_", 43), ("rpa_", 40), ("fw_", 24), ("jina_", 60),
          ("pcsk_", 70), ("tvly-", 32), ("AQ.Ab", 45), ("1//0", 90), ("glc_", 80), ("dp.st.", 43), ("xkeysib-", 64),
          ("sq0atp-", 22), ("sq0csp-", 43), ("sb_secret_", 31), ("rdme_", 70), ("sha256~", 43), ("pnu_", 36), ("sqp_", 40),
          ("sgp_", 40), ("bkua_", 40), ("CFPAT-", 43), ("cfut_", 40), ("nfp_", 36), ("vcp_", 56), ("ops_eyJ", 130), ("fm2_", 90),
          ("fo1_", 43), ("HRKU-AA", 58), ("EZAK", 54), ("GOOG1E", 57), ("CLOJARS_", 60), ("bedrock-api-key-", 60),
          ("LS0tLS1CRUdJTiBS", 100), ("hf_oauth_", 60), ("hf_jwt_", 60), ("csk-", 48), ("phx_", 43), ("key-", 32), ("oy2", 43),
          ("cio", 32), ("e2b_", 40), ("secret_", 43), ("as-", 22), ("pa-", 43), ("sl.", 130), ("s.", 24), ("CCIPAT_", 60),
          ("EAACEdEose0cBA", 80), ("rnd_", 28), ("dp.ct.", 43), ("phs_", 43), ("napi_", 64), ("sess-", 40), ("xau_", 36), ("fc-", 32), ("SK", 32),
          ("sk_", 48), ("cmVmdGtu", 56), ("gAAAAAB", 100), ("AVNS_", 19), ("rk_" + "prod_", 24), ("sm_aat_", 16), ("ALTAK", 22)]
# Of issuers that epkit does not know
UNKNOWN = ["", "EAAA", "EAAM", "t1.9eu", "YCAJE", "esecret_", "aph0_", "re_aB3dE5fG_", "bkct_", "dp.scim.", "nfc_", "mdb_sa_sk_", "4/0A",
           "IQoJb3JpZ2lu", "Atza|", "CW-SECRET-", "v1.CmQK", "dbtc_", "pylf_v1_us_", "MTIzNDU2Nzg5MDEyMzQ1Njc4.Gabc12.", "hcaik_01",
           "5123456789:AA", "abc8Q~", "x.atlasv1.", "ico-", "fio-u-", "cfk_", "SWMKEY-1-", "https://x.example/a?key=", "a=b,c="]
# What a word or an option in front announces: the word with '{}' for the secret.
ANNOUNCED = ["--password={}", "--token={}", "--api-key={}", "HF_TOKEN={}", "WANDB_API_KEY={}", "DB_PASSWORD={}",
             "AWS_SECRET_ACCESS_KEY={}", "https://me:{}@host.example/x", "https://x.example/a?token={}&b=1",
             "Authorization: Bearer {}", "X-Api-Key: {}", "curl -H 'Authorization: Basic {}' x", "run --password {} now",
             '{{"password": "{}"}}', "export SLACK_SECRET='{}'", "AccountKey={}", "--password -{}", "--password --{}",
             "--password\t{}", "postgres://me:hun#{}@host.example/x", "postgres://me:a/b?{}@host.example/x", "--user=me:{}",
             "curl -u me:{} x", "curl --proxy-user me:{} x", "--pwd {}", '{{\\"api_key\\":\\"{}\\"}}', '{{"pass":"{}"}}',
             "Cookie: a=x; b={}", "curl -H 'Cookie: a=x; b={}' x", "API_TOKENS={}", "https://{}0123456789abc@host.example/x",
             "https://hooks.slack.com/services/T01234567/B01234567/{}",
             "https://discord.com/api/webhooks/123456789012345678/{}",
             "https://open.feishu.cn/open-apis/bot/v2/hook/0123456789{}", "https://api.telegram.org/bot123456:AA0123456{}/x",
             "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=0123456789{}", "wandb login 0123456789abc{}",
             "wandb login --relogin 0123456789abc{}", "mysql -u root -p{} db", "/usr/bin/mysqldump -p'{}' db", "sshpass -p {} ssh h",
             "cd x && sshpass -p'{}' ssh h", "docker login -u me -p {} h", "redis-cli -a {} ping", "curl -ume:{} x",
             "openssl req -passin pass:{}", "password = {}", "password : {}", "Authorization : Bearer {}",
             'Authorization = "token {}"', "api_key = '{}'", '"api_key" : "{}"', "[auth]\\ttoken = \"{}\"", "setenv HF_TOKEN {}",
             "set -x HF_TOKEN {}", "aws configure set aws_secret_access_key {}", "machine h login me password {}",
             "<password>{}</password>", "x?next=%3Fpassword%3D{}", "password => {}", "- name: HF_TOKEN\\n  value: {}",
             '{{"name": "HF_TOKEN", "value": "{}"}}', "secretAccessKey: {}", "basic_auth: me:{}", "--from-literal=key={}",
             "https://x.example/?sv=1&sig={}%3D", "https://x.example/?X-Amz-Signature={}&x=1", '{{"auths": {{"h": {{"auth": "{}"}}}}}}',
             "//registry.npmjs.org/:_authToken={}", "Server=h;Password={};x=y", "client-key-data: LS0tLS1CRUdJTi" + "a" * 60 + "{}",
             "vault login {}", "vault operator unseal {}", "smbclient //h/s -U me%{}", "smbclient -Ume%{} //h/s", "lftp -u me,{} h",
             "net use Z: \\\\h\\s {} /user:me", "net use \\\\h\\s /user:me {}", "net user me {} /add", "echo {} | sudo -S true",
             "printf '%s\\n' '{}' | sudo -k -S true", "sudo -S true <<< '{}'", "echo {} | docker login -u me --password-stdin h",
             "echo -n {}|helm registry login h --password-stdin", "echo {} | gh auth login --with-token", "echo me:{} | chpasswd",
             "echo {} | kinit me", "echo {} | gpg --batch --passphrase-fd 0 -d x", "plink -pw {} h", "keytool -storepass {} -list",
             "xfreerdp /u:me /p:{} /v:h", "snmpget -v3 -A {} h", "htpasswd -bc f me {}", "rabbitmqctl add_user me {}",
             "curl -b 'a={}' h", "http -a me:{} h", "sqlcmd -U sa -P {}", "useradd -p {} me", "mc alias set m http://h me {}",
             "SLURM_JWT={}", "redis://:{}@cache:6379/0", "https://me@corp.example:{}@h/x", "http://[u]:{}@h",
             "amqp://me:{}@[fe80::1]:5672/v", "postgres://me:{}@${{DB_HOST}}:5432/db", "GOOGLEAPI_KEY={}", "ldappasswd -s {}",
             "curl -sSLu me:{} x", "curl -U me:{} x", "-HAuthorization: Token {}", "skopeo copy --src-creds me:{} a b",
             "vault login -no-print {}", "vault login -method=token {}", "vault kv put secret/x value={}", "bao login {}",
             "redis-cli AUTH {}", "redis-cli AUTH me {}", "redis-server --requirepass {}", "openssl enc -K {}", "rar a -hp{} x",
             "smbclient //h/s --user=me%{}", 'lftp -e "open -u me,{} h"', "npm config set //r/:_authToken {}",
             "aws configure set default.aws_session_token {}", "nmcli con mod x wifi-sec.psk {}", "mpiexec -genv HF_TOKEN {} x",
             "htpasswd -Bbn me {}", "mc config host add m http://h me {}", "++secrets.x={}", "//me:{}@h/x", "Server=h;Pwd={};",
             "os.environ['HF_TOKEN'] = '{}'", "wandb.login(key='{}0123456789abc')", '["--password", "{}"]', "--bearer {}",
             "wandb login --host https://x {}", "KAGGLE_KEY={}", "Ocp-Apim-Subscription-Key: {}", "dotnet nuget push -k {} x", "https://conda.anaconda.org/t/{}0123456789abc/x", "snmpget -c {} h", "ldapsearch -xw {}",
             "Authorization: SSWS {}", 'curl -H "Authorization: Api-Token {}" x', "%7B%22token%22%3A%20%22{}%22%7D",
             "&quot;password&quot;:&quot;{}&quot;", '<add key="Password" value="{}"/>', '{{"Name":"password","Value":"{}"}}',
             "--env name=HF_TOKEN,value={}", "user[password]={}", "CREATE USER me WITH PASSWORD '{}'", "--pw {}",
             "B2_APPLICATION_KEY={}", "FERNET_KEY={}", "kubeadm join h:6443 --certificate-key {}", "DB_PW={}", "JSESSIONID={}", "USERPWD={}",
             "ipmitool user set password 2 {}", "ipmipower -h h -u u -p {} --stat", "curl --cert c.pem:{} x", "gh secret set X -b {}",
             "poetry config http-basic.x me {}", "vault kv put secret/x a={}", "bw login me {}", "rclone config create r s3 pass {}",
             "wandb login --verify 0123456789abc{}", "x-functions-key: {}", "psql me:{}@db.example/x", "http_proxy=me:{}@proxy:3128",
             "me:{}@tcp(127.0.0.1:3306)/db", "the password is {}", "The password is: {}", "Root Password: {}", "API key: {}",
             "secret_key: {}", "wandb_key: {}", "  wandb_key .......................... {}", "+wandb.key={}", "passcode: {}",
             "ansible_become_pass: {}", "AccountingStoragePass={}", "TF_TOKEN_app_terraform_io={}", "POETRY_PYPI_TOKEN_X={}",
             "LITELLM_SALT_KEY={}", "NB_SETUP_KEY={}", "LD_SDK_KEY={}", "AWS_KEY={}", "aws s3 cp --sse-c-key {} x y",
             "aws ssm put-parameter --name x --type SecureString --value {}", "gcloud auth activate-refresh-token me {}",
             "pulumi config set --secret x {}", "ossutil config -e h -i x -k {}", "obsutil config -i=x -k={} -e=h", "swanlab login -k {}",
             "coscmd config -a x -s {}", "anaconda -t {} upload f", "ssh-keygen -N {} -f x", "ansible-vault encrypt_string {}", "pro attach {}",
             "nvdebug -i x -u root -p {}", "composer config http-basic.h me {}", "composer config github-oauth.github.com {}",
             "mc admin user add m me {}", "wandb login --host=https://x.example 0123456789abc{}", "set -Ux HF_TOKEN {}",
             "https://sctapi.ftqq.com/SCT12345T0123456789{}.send", "https://api.day.app/0123456789abc{}/x",
             "MUNGE:AwQDAAC0" + "aB3dE5fG" * 4 + "{}==:"]
# Words that may stand in a sentence: what follows looks random
SENTENCES = ["ngrok config add-authtoken {}", "cargo login {}", "vastai set api-key {}", "conda config --set token {}"]
# Of letters alone
LETTERS = ["X-Api-Key: {}", "PRIVATE-TOKEN: {}"]


def secrets():
    """(word, secret) of each form."""
    for i, (beginning, length) in enumerate(TOKENS):
        body = (BODY[i % 7:] + BODY)[:length]
        yield beginning + body, body
    for i, beginning in enumerate(UNKNOWN):
        body = (BODY[i % 7:] + BODY)[:24 + 3 * i]
        yield beginning + body, body
    for beginning in ["p8e-", "slk_", "lin_oauth_", "ls__", "dose", "bce-v3/ALTAK-0123456789/", "K10", "amzn1.oa2-cs.v1."]:
        yield beginning + HEX, HEX
    for beginning in ["ms-", "access-production-", "pat-na1-", "amzn.mws."]:
        yield beginning + "0b5c6e2a-93f1-4d3c-8a55-7d1f9f2f3c11", "0b5c6e2a-93f1-4d3c-8a55-7d1f9f2f3c11"
    yield "AKIA" + "IOSFODNN7EXAMPL4", "IOSFODNN7EXAMPL4"
    yield "dop_v1_" + HEX, HEX
    yield "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYzTESTKEYAB"[:18], "K7MDENG/bPxRfiCY"
    yield "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0." + BODY[:43], "eyJzdWIiOiIxMjM0NTY3ODkwIn0"
    yield "SG." + BODY[:22] + "." + BODY[:43], BODY[:22] + "." + BODY[:43]
    key = "-----BEGIN " + "PRIVATE KEY-----"
    yield key + " MIIE" + BODY[:64] + " " + key.replace("BEGIN", "END"), "MIIE" + BODY[:64]
    key = "-----{} OpenVPN Static key V1-----"
    yield key.format("BEGIN") + " " + HEX + " " + key.format("END"), HEX
    for i, form in enumerate(ANNOUNCED):
        secret = "pw" + BODY[i % 60:][:9] + str(100 + i)
        yield form.format(secret), secret
    for i, form in enumerate(SENTENCES):
        yield form.format(BODY[i:i + 16]), BODY[i:i + 16]
    for form in LETTERS:
        yield form.format("abcdefghijklmnop"), "abcdefghijklmnop"


if sys.argv[1] == "words":
    for word, _ in secrets():
        print(word)
else:
    found = False
    for path in sys.argv[2:]:
        text = open(path, encoding="utf-8", errors="replace").read()
        for word, secret in secrets():
            if secret in text:
                print(f"{path}: the secret of {word}")
                found = True
    sys.exit(found)
