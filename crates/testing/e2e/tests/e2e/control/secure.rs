//! A cluster with certificates: programs whose pages travel by TLS, donors that are killed, and
//! pagers; and a node that knows a space's id.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{
            Cluster, PATIENCE, PATIENT_WITH_DONORS, all, hecaton, log_in, ready_line, scratch,
        },
        process::{Running, kill_dead, run},
    },
    programs::end_verified,
};
use anyhow::{Context as _, ensure};
use hecaton_memory::{Epoch, SpaceId};
use hecaton_transport::{
    client::{Connection, ConnectionError, Options},
    protocol::{Hello, Refusal, VERSIONS},
    tls::{CredentialsDir, Destination, Tls},
};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

/// A certificate of the cluster's authority.
pub(crate) fn issue(
    pki: &Path,
    name: &str,
    role: &str,
    options: &[&str],
) -> anyhow::Result<PathBuf> {
    let mut command = Command::new(hecaton()?);
    command.args(["pki", "issue", name, "--role", role]).args(options).arg("--dir").arg(pki);
    run(&mut command, PATIENCE)?.expect_success("hecaton pki issue")?;
    Ok(pki.join("issued").join(name))
}

/// A manager with certificates.
pub(crate) struct SecureManager {
    /// The authority's directory.
    pub(crate) pki: PathBuf,
    pub(crate) url: String,
    pub(crate) manager: Running,
}

/// An authority, and a manager that has its certificate from it and logs as much as `filter` says.
pub(crate) fn secure_manager(
    scratch: &tempfile::TempDir,
    filter: &str,
) -> anyhow::Result<SecureManager> {
    let pki = scratch.path().join("pki");
    let mut init = Command::new(hecaton()?);
    run(init.args(["pki", "init", "--dir"]).arg(&pki), PATIENCE)?.expect_success("pki init")?;
    let own = issue(&pki, "m", "manager", &["--host", "127.0.0.1"])?;
    let mut command = Command::new(hecaton()?);
    command.args(["manager", "--json", "--listen", "127.0.0.1:0", "--tls-dir"]).arg(own);
    command.env("HECATON_LOG", filter);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log_in(scratch)?);
    let mut manager = Running::spawn(&mut command)?;
    let ready = ready_line(&mut manager)?;
    let url = ready["manager"].as_str().context("no URL")?.to_owned();
    Ok(SecureManager { pki, url, manager })
}

/// No other node gets at a space of which it knows the id, at any donor that has a part of it.
fn refuses_strangers(cluster: &Cluster, stranger: PathBuf) -> anyhow::Result<()> {
    let credentials = Arc::new(CredentialsDir::new(stranger));
    let status = cluster.status()?;
    let mut asked = 0;
    for donor in all(&status, "donors") {
        for space in donor["stats"]["spaces"].as_array().into_iter().flatten() {
            if space["extents"].as_u64() == Some(0) {
                continue;
            }
            let hello = Hello {
                versions: VERSIONS,
                space: SpaceId(space["space"].as_u64().context("no id")?),
                epoch: Epoch(u64::MAX),
                lane: 1,
                lease: Duration::from_secs(1),
                consumer: "stranger".to_owned(),
            };
            let address = donor["address"].as_str().context("no address")?.parse()?;
            let tls = Some(Tls { credentials: Arc::clone(&credentials), node: None });
            let opened =
                Connection::open(Destination { address, tls }, &hello, &Options::default());
            let is_refused = matches!(opened, Err(ConnectionError::Refused(Refusal::OtherNode)));
            ensure!(is_refused, "a stranger is let in, or not heard: {:?}", opened.err());
            asked += 1;
        }
    }
    ensure!(asked > 0, "no donor has anything of a space");
    Ok(())
}

/// A pager and a donor are killed while a program runs: its pages are copied anew, from donor to
/// donor, and all of that between nodes that know each other.
pub(crate) fn pages_travel_by_tls() -> TestResult {
    let scratch = scratch()?;
    let SecureManager { pki, url, manager: _manager } = secure_manager(&scratch, "warn")?;
    let node = |name: &str, options: &[&str]| {
        let mut command = Command::new(hecaton()?);
        command.args(["node", "--name", name, "--manager", &url]).args(options);
        command.arg("--tls-dir").arg(issue(&pki, name, "node", &[])?);
        command.args(["--adopt-within", "0", "--dir"]).arg(scratch.path().join(name));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log_in(&scratch)?);
        Running::spawn(&mut command)
    };
    let lend = ["--lend", "300M"];
    let mut lenders = ["one", "two", "three"]
        .map(|name| node(name, &lend))
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    let borrower = node("borrower", &[])?;
    let admin = issue(&pki, "root", "admin", &[])?;
    let variable = format!("HECATON_TLS={}", admin.display());
    let prefix = vec!["env".into(), variable.into()];
    let dir = scratch.path().join("borrower");
    let cluster = Cluster::of(url.clone(), prefix, borrower, scratch)?;
    cluster.wait_for_donors(lenders.len())?;

    let mut program = cluster.command("run");
    program.env_remove("HECATON_MANAGER").arg("--dir").arg(&dir);
    program.args(["--local", "16M", "--mirror", "2"]).args(PATIENT_WITH_DONORS).arg("--");
    program.arg(env!("CARGO_BIN_EXE_verify-threads")).args(["1", "8000"]);
    program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(cluster.log()?);
    let mut program = Running::spawn(&mut program)?;
    cluster.eventually("the program's pages are in the pool", PATIENCE, |status| {
        let lent = |donor: &serde_json::Value| donor["stats"]["lent_pages"].as_u64() > Some(0);
        Ok(all(status, "donors").filter(|donor| lent(donor)).count() > 1)
    })?;
    refuses_strangers(&cluster, issue(&pki, "stranger", "node", &[])?)?;
    cluster.until_whole()?;
    kill_dead(cluster.pager_of_only_consumer()?);
    // With its donor, which does not outlive it.
    let mut killed = lenders.remove(0);
    kill_dead(killed.id());
    killed.wait(PATIENCE, || Ok(()))?;
    cluster.eventually("copies are made anew", PATIENCE, |status| {
        let filled = |donor: &serde_json::Value| donor["stats"]["pages_filled"].as_u64() > Some(0);
        Ok(all(status, "donors").any(filled))
    })?;
    end_verified(&cluster, &mut program)?;
    // Its node is removed, or what its donor has said last would be waited for. The manager removes
    // no node that has just been heard.
    cluster.eventually("the node that was killed is silent", PATIENCE, |status| {
        let mut nodes = status["nodes"].as_array().into_iter().flatten();
        let is_silent = nodes.any(|node| node["name"] == "one" && node["state"] == "silent");
        Ok(is_silent && all(status, "consumers").count() == 0)
    })?;
    run(cluster.command("node").args(["remove", "one"]), PATIENCE)?
        .expect_success("node remove")?;
    cluster.wait_until_idle(PATIENCE)?;
    let log = cluster.log_tail();
    ensure!(!log.contains("PRIVATE"), "a key is in the log");
    for mut lender in lenders {
        lender.signal(rustix::process::Signal::TERM);
        lender.wait(PATIENCE, || Ok(()))?;
    }
    Ok(Outcome::Passed)
}
