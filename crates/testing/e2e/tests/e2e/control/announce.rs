//! Hosts that find each other's donors by announcements, without a manager.

use crate::harness::{
    Outcome, TestResult,
    cluster::{LONG, PATIENCE, at_host, eventually, hecaton, log_in, scratch},
    process::{Running, Stopped, missing, run, signal},
};
use anyhow::{Context as _, ensure};
use hecaton_netns::{NetError, Network, cluster::announcing_node, cluster::prefix};
use rustix::process::Signal;
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

const BORROWER: usize = 0;
const LEND_BYTES: u64 = 200 << 20;

/// Hosts with nodes that tell each other what they lend.
struct Hosts {
    network: Network,
    scratch: tempfile::TempDir,
    key: PathBuf,
}

impl Hosts {
    fn node(&self, host: usize) -> anyhow::Result<Running> {
        self.node_with(host, &self.key)
    }

    fn node_with(&self, host: usize, key: &Path) -> anyhow::Result<Running> {
        let lend = (host != BORROWER).then_some(LEND_BYTES);
        let directory = at_host(self.scratch.path(), host)?;
        let mut command =
            announcing_node(&hecaton()?, self.network.host(host), &directory, key, lend);
        let log = log_in(&self.scratch)?;
        Running::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log))
    }

    /// A command on the borrower's host.
    fn command(&self, subcommand: &str) -> anyhow::Result<Command> {
        let directory = at_host(self.scratch.path(), BORROWER)?;
        let mut words = prefix(self.network.host(BORROWER), &directory).into_iter();
        let mut command = Command::new(words.next().context("no words")?);
        command.args(words).arg(hecaton()?).arg(subcommand).stdin(Stdio::null());
        Ok(command)
    }

    /// Waits until the borrower's node knows just these donors.
    fn until_known(&self, hosts: &[usize]) -> anyhow::Result<()> {
        let wanted: Vec<String> =
            hosts.iter().map(|host| self.network.host(*host).name()).collect();
        let status = || {
            let ended = run(self.command("status")?.arg("--json"), PATIENCE)?;
            ended.expect_success("hecaton status --json")?;
            Ok(serde_json::from_slice::<Value>(&ended.stdout)?)
        };
        eventually(status, &format!("the donors known are {wanted:?}"), PATIENCE, |status| {
            ensure!(status["manager"].is_null(), "there is a manager: {status}");
            let known = status["donors_known"].as_array().into_iter().flatten();
            let mut known: Vec<_> = known.filter_map(|donor| donor["name"].as_str()).collect();
            known.sort_unstable();
            Ok(known == wanted)
        })
    }
}

/// Donors are found, used, and missed when they end or fall silent; one whose node has another key
/// is never heard of.
pub(crate) fn finds_donors_without_a_manager() -> TestResult {
    if let Some(reason) = missing("nsenter") {
        return Ok(Outcome::Skipped(reason));
    }
    let network = match Network::new(5) {
        Ok(network) => network,
        Err(error @ (NetError::NotPermitted(_) | NetError::Missing { .. })) => {
            return Ok(Outcome::Skipped(format!("no network namespaces: {error}")));
        }
        Err(error) => return Err(error.into()),
    };
    let scratch = scratch()?;
    let [key, other_key] = ["key", "other-key"].map(|name| scratch.path().join(name));
    fs::write(&key, "a secret of all nodes")?;
    fs::write(&other_key, "a secret of others'")?;
    let hosts = Hosts { network, scratch, key };
    let mut borrower = hosts.node(BORROWER)?;
    let mut first = hosts.node(1)?;
    let mut second = hosts.node(2)?;
    let mut stranger = hosts.node_with(4, &other_key)?;
    hosts.until_known(&[1, 2])?;

    let mut program = hosts.command("run")?;
    program.args(["--local", "16M", "--mirror", "2", "--"]);
    program.arg(env!("CARGO_BIN_EXE_verify-threads")).args(["2", "4000"]);
    let ended = run(&mut program, LONG)?;
    ended.expect_success("a program on donors that were announced")?;
    ensure!(ended.text().starts_with("verified"), "it said {:?}", ended.text());

    signal(first.id(), Signal::TERM);
    first.wait(PATIENCE, || Ok(()))?;
    let mut third = hosts.node(3)?;
    hosts.until_known(&[2, 3])?;
    let ended = run(&mut hosts.command("status")?, PATIENCE)?;
    ended.expect_success("hecaton status")?;
    ensure!(ended.text().contains("no manager"), "{}", ended.text());

    let stopped = Stopped::stop(second.id());
    hosts.until_known(&[3]).context("one that is silent")?;
    drop(stopped);
    hosts.until_known(&[2, 3]).context("one that is heard again")?;

    for node in [&mut borrower, &mut second, &mut third, &mut stranger] {
        signal(node.id(), Signal::TERM);
        node.wait(Duration::from_secs(20), || Ok(()))?;
    }
    Ok(Outcome::Passed)
}
