//! Tests that the most verbose log contains no secret.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, PATIENCE, all, hecaton, log_in, ready_line, scratch, when_unused},
        process::{Ended, Running, kill_dead, missing, run},
    },
    programs::end_verified,
    secure::{SecureManager, issue, secure_manager},
};
use anyhow::{Context as _, ensure};
use std::{
    fs,
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The most verbose filter of the log.
const FILTER: &str = "trace";

/// A text that no log may contain, and its owner.
struct Secret {
    whose: String,
    text: String,
}

/// Bytes in each form in which a program may print them.
fn printed(whose: &str, bytes: &[u8]) -> Vec<Secret> {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let list = format!("{bytes:?}");
    let list = list.trim_matches(['[', ']']).to_owned();
    let escaped = bytes.escape_ascii().to_string();
    let texts = [hex.to_uppercase(), hex, list, escaped];
    texts.map(|text| Secret { whose: whose.to_owned(), text }).into()
}

fn from_base64(text: &str) -> anyhow::Result<Vec<u8>> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bits, mut count, mut bytes) = (0u32, 0, Vec::new());
    for byte in text.bytes().filter(|byte| *byte != b'=') {
        let digit = DIGITS.iter().position(|digit| *digit == byte).context("no base64")?;
        (bits, count) = (bits << 6 | digit as u32, count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Ok(bytes)
}

/// Secrets in a private key's file (PKCS #8, elliptic curve): its lines, and its number in each
/// printed form. They are found alone or with the bytes around them.
fn of_key(file: &Path) -> anyhow::Result<Vec<Secret>> {
    // Start of the octet string of 32 bytes that comes first in a key of version 1 (RFC 5915).
    const BEFORE: &[u8] = &[0x02, 0x01, 0x01, 0x04, 0x20];
    let whose = file.display().to_string();
    let pem = fs::read_to_string(file).with_context(|| whose.clone())?;
    let body: Vec<&str> = pem.lines().filter(|line| !line.starts_with("-----")).collect();
    let der = from_base64(&body.concat())?;
    let at = der.windows(BEFORE.len()).position(|window| window == BEFORE);
    let at = at.with_context(|| format!("{whose} is no key of an elliptic curve"))? + BEFORE.len();
    let number = der.get(at..at + 32).context("it is cut off")?;
    let mut secrets = printed(&whose, number);
    // The public key follows after these lines.
    let lines = body.iter().take(2);
    secrets.extend(lines.map(|line| Secret { whose: whose.clone(), text: (*line).to_owned() }));
    for leak in [format!("key: {der:?}"), format!("key: {pem:?}")] {
        ensure!(told(&leak, &secrets).is_some(), "{whose} is not found where it is");
    }
    Ok(secrets)
}

fn told<'a>(log: &str, secrets: &'a [Secret]) -> Option<&'a Secret> {
    secrets.iter().find(|secret| log.contains(&secret.text))
}

/// Collects all keys below a directory.
fn keys_in(dir: &Path, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match path.is_dir() {
            true => keys_in(&path, found)?,
            false if name.contains("key") && name.contains(".pem") => found.push(path),
            false => {}
        }
    }
    Ok(())
}

/// Nodes join with a token, and one is refused. A pager of an encrypted program is killed. An
/// encrypted volume and an administrator's commands run. All use the most verbose log.
pub(crate) fn are_in_no_log() -> TestResult {
    if let Some(reason) = missing("nbdcopy") {
        return Ok(Outcome::Skipped(reason));
    }
    let scratch = scratch()?;
    let SecureManager { pki, url, manager: _manager } = secure_manager(&scratch, FILTER)?;
    let mut serve = Command::new(hecaton()?);
    serve.args(["pki", "serve", "--json", "--listen", "127.0.0.1:0", "--dir"]).arg(&pki);
    serve.env("HECATON_LOG", FILTER).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut authority = Running::spawn(serve.stderr(log_in(&scratch)?))?;
    let at = ready_line(&mut authority)?["authority"].as_str().context("no address")?.to_owned();
    let mut command = Command::new(hecaton()?);
    command.args(["pki", "token", "--uses", "2", "--at", &at, "--dir"]).arg(&pki);
    let token = run(&mut command, PATIENCE)?;
    token.expect_success("hecaton pki token")?;
    let token = token.text().trim().to_owned();
    let token_file = scratch.path().join("token");
    let mut options = fs::OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(&token_file);
    file?.write_all(token.as_bytes())?;

    let node = |name: &str| {
        let mut command = Command::new(hecaton()?);
        command.args(["node", "--name", name, "--manager", &url, "--lend", "120M", "--join"]);
        command.arg(&token_file).arg("--tls-dir").arg(scratch.path().join(format!("{name}-tls")));
        command.args(["--adopt-within", "0", "--dir"]).arg(scratch.path().join(name));
        command.env("HECATON_LOG", FILTER).stdin(Stdio::null()).stdout(Stdio::null());
        Running::spawn(command.stderr(log_in(&scratch)?))
    };
    let (borrower, _other) = (node("a")?, node("b")?);
    let (dir, log) = (scratch.path().join("a"), log_in(&scratch)?);
    let admin = issue(&pki, "root", "admin", &[])?;
    let prefix = [format!("HECATON_TLS={}", admin.display()), format!("HECATON_LOG={FILTER}")];
    let prefix = ["env".to_owned()].into_iter().chain(prefix).map(Into::into).collect();
    let cluster = Cluster::of(url.clone(), prefix, borrower, scratch)?;
    cluster.wait_for_donors(2)?;
    // The token is used up.
    let mut late = node_that_is_late(&url, &token_file, &cluster)?;
    ensure!(!late.wait(PATIENCE, || Ok(()))?.success(), "a token took in a node too many");

    let mut program = cluster.command("run");
    program.env_remove("HECATON_MANAGER").arg("--dir").arg(&dir);
    program.args(["--local", "16M", "--mirror", "2", "--encrypt", "--"]);
    program.arg(env!("CARGO_BIN_EXE_verify-threads")).args(["1", "6000"]);
    program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log.try_clone()?);
    let mut program = Running::spawn(&mut program)?;
    cluster.eventually("the program's pages are in the pool", PATIENCE, |status| {
        let lent = |donor: &serde_json::Value| donor["stats"]["lent_pages"].as_u64() > Some(0);
        Ok(all(status, "donors").filter(|donor| lent(donor)).count() > 1)
    })?;
    kill_dead(cluster.pager_of_only_consumer()?);
    cluster.eventually("another pager serves", PATIENCE, |status| {
        Ok(all(status, "consumers").any(|one| one["restarts"].as_u64() > Some(0)))
    })?;
    end_verified(&cluster, &mut program)?;

    let volume = |words: &[&str]| -> anyhow::Result<Ended> {
        let mut command = cluster.command("volume");
        command.env_remove("HECATON_MANAGER").args(words).arg("--dir").arg(&dir);
        let ended = run(&mut command, PATIENCE)?;
        log.try_clone()?.write_all(ended.stderr.as_bytes())?;
        Ok(ended)
    };
    let (socket, image) = (cluster.file("disk.nbd"), cluster.file("image"));
    fs::write(&image, vec![7; 8 << 20])?;
    volume(&["create", "disk", "--size", "8M", "--encrypt"])?.expect_success("volume create")?;
    let address = format!("unix:{}", socket.display());
    volume(&["export", "disk", "--nbd", &address])?.expect_success("volume export")?;
    let uri = format!("nbd+unix:///disk?socket={}", socket.display());
    run(Command::new("nbdcopy").arg("--flush").arg(&image).arg(&uri), PATIENCE)?
        .expect_success("nbdcopy")?;
    when_unused(PATIENCE, || volume(&["delete", "disk"]))?;
    cluster.wait_until_idle(PATIENCE)?;

    let mut keys = Vec::new();
    keys_in(cluster.file("").as_path(), &mut keys)?;
    // Keys of the authority, the manager, the administrator and two nodes.
    ensure!(keys.len() >= 5, "there are only {keys:?}");
    let mut secrets = Vec::new();
    for key in &keys {
        secrets.extend(of_key(key)?);
    }
    let shown = token.split('.').nth(1).context("a token without a secret")?;
    secrets.push(Secret { whose: "the token".to_owned(), text: shown.to_owned() });
    let bytes: Result<Vec<u8>, _> =
        (0..shown.len() / 2).map(|at| u8::from_str_radix(&shown[2 * at..2 * at + 2], 16)).collect();
    secrets.extend(printed("the token", &bytes?));

    let log = String::from_utf8_lossy(&fs::read(cluster.file("log"))?).into_owned();
    // Log of authority, manager, nodes, donors, volumes and pagers, with the killed pager.
    for word in
        ["TRACE rustls", "axum", "hecaton_donor", "hecaton_space", "hecaton_node", "took a node in"]
    {
        ensure!(log.contains(word), "there is no {word} in {} bytes of log", log.len());
    }
    if let Some(secret) = told(&log, &secrets) {
        let line = log.lines().find(|line| line.contains(&secret.text)).unwrap_or_default();
        let begin: String = line.chars().take(120).collect();
        anyhow::bail!("{} is in the log: {begin}", secret.whose);
    }
    Ok(Outcome::Passed)
}

/// Starts a node with a token that other nodes have used up.
fn node_that_is_late(url: &str, token: &Path, cluster: &Cluster) -> anyhow::Result<Running> {
    let mut command = Command::new(hecaton()?);
    command.args(["node", "--name", "c", "--manager", url, "--join"]).arg(token);
    command.arg("--tls-dir").arg(cluster.file("c-tls")).arg("--dir").arg(cluster.file("c"));
    command.env("HECATON_LOG", FILTER).stdin(Stdio::null()).stdout(Stdio::null());
    Running::spawn(command.stderr(cluster.log()?))
}
