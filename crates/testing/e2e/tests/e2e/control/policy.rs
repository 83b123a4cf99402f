//! The cluster's policy: set, replaced and lifted under programs, kept by a manager that is killed.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG, PATIENCE, all, eventually, log_in, ready_line, scratch},
    process::{Running, kill_dead, missing, run},
};
use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use std::{
    io::{BufRead as _, BufReader, Read as _},
    path::{Path, PathBuf},
    process::{ChildStdout, Command, Stdio},
};

const PAGE: u64 = 4096;

/// Memory that the node of the two programs lends. Half of it is less than one program would hold,
/// and more than one must hold.
const LENDS: &str = "112M";
const LENDS_PAGES: u64 = (112 << 20) / PAGE;

/// Local memory of a program, and all that it has beside what its interpreter takes.
const LOCAL: &str = "24M";
const PAGES: u64 = 16_384;

/// Pages that are on their way when a target is reached.
const SLACK: u64 = 1024;

/// Reads and writes its memory at random until its input ends, and verifies it.
const PROGRAM: &str = "
import random, select, sys
PAGE, PAGES = 4096, 16384
memory = bytearray(PAGES * PAGE)
expected = list(range(1, PAGES + 1))
def read(page):
    return int.from_bytes(memory[page * PAGE:page * PAGE + 8], 'little')
def write(page):
    memory[page * PAGE:page * PAGE + 8] = expected[page].to_bytes(8, 'little')
for page in range(PAGES):
    write(page)
print('filled', flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(256):
        page = random.randrange(PAGES)
        assert read(page) == expected[page]
        if page % 3 == 0:
            expected[page] += PAGES
            write(page)
assert all(read(page) == expected[page] for page in range(PAGES))
print('verified')
";

/// A manager with a registry, and two nodes of which one has programs.
struct Hosts {
    hecaton: PathBuf,
    url: String,
    manager: Running,
    _nodes: Vec<Running>,
    scratch: tempfile::TempDir,
    state: tempfile::TempDir,
}

impl Hosts {
    fn start(hecaton: &Path) -> anyhow::Result<Hosts> {
        let scratch = scratch()?;
        let state = state_dir()?;
        let (manager, url) = start_manager(hecaton, &scratch, &state, "127.0.0.1:0")?;
        let nodes = [("a", LENDS), ("b", "256M")].map(|(name, lends)| {
            Running::spawn(
                Command::new(hecaton)
                    .args(["node", "--name", name, "--lend", lends, "--manager", &url, "--dir"])
                    .arg(scratch.path().join(name))
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(log_in(&scratch)?),
            )
        });
        let nodes = nodes.into_iter().collect::<anyhow::Result<_>>()?;
        let hecaton = hecaton.to_owned();
        let hosts = Hosts { hecaton, url, manager, _nodes: nodes, scratch, state };
        hosts.eventually("both nodes serve", |status| {
            Ok(all(status, "donors").filter(|donor| donor["state"] == "serving").count() == 2)
        })?;
        Ok(hosts)
    }

    fn program(&self) -> anyhow::Result<(Running, BufReader<ChildStdout>)> {
        let mut command = Command::new(&self.hecaton);
        command.args(["run", "--local", LOCAL, "--dir"]).arg(self.scratch.path().join("a"));
        command.args(["--", "python3", "-c", PROGRAM]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log_in(&self.scratch)?);
        let mut running = Running::spawn(&mut command)?;
        let output = running.output()?;
        let mut output = BufReader::new(output);
        let mut line = String::new();
        output.read_line(&mut line)?;
        ensure!(line == "filled\n", "the program does not fill its memory: {line:?}");
        Ok((running, output))
    }

    fn hecaton(&self, words: &str) -> anyhow::Result<String> {
        let mut command = Command::new(&self.hecaton);
        command.args(words.split(' ')).args(["--manager", &self.url]);
        let ended = run(&mut command, PATIENCE)?;
        ended.expect_success(words)?;
        Ok(ended.text())
    }

    fn policy(&self) -> anyhow::Result<Value> {
        let shown: Value = serde_json::from_str(&self.hecaton("policy show --json")?)?;
        Ok(shown["policy"].clone())
    }

    fn status(&self) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&self.hecaton("status --json")?)?)
    }

    fn eventually(
        &self,
        what: &str,
        condition: impl Fn(&Value) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let log = || std::fs::read_to_string(self.scratch.path().join("log")).unwrap_or_default();
        eventually(|| self.status(), what, PATIENCE, condition).with_context(log)
    }
}

/// A directory for a manager's registry, where an order is answered in time.
pub(crate) fn state_dir() -> anyhow::Result<tempfile::TempDir> {
    Ok(tempfile::tempdir_in(hecaton_testkit::fast_dir())?)
}

/// A manager with a registry in `state`, and its URL.
pub(crate) fn start_manager(
    hecaton: &Path,
    scratch: &tempfile::TempDir,
    state: &tempfile::TempDir,
    address: &str,
) -> anyhow::Result<(Running, String)> {
    let mut manager = Running::spawn(
        Command::new(hecaton)
            .args(["manager", "--json", "--listen", address, "--state"])
            .arg(state.path().join("state"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log_in(scratch)?),
    )?;
    let ready = ready_line(&mut manager)?;
    Ok((manager, ready["manager"].as_str().context("no URL")?.to_owned()))
}

/// Pages of the pool that each consumer holds, and its target in pages. `None` if a consumer
/// reports no target.
fn held_and_targets(status: &Value) -> Option<Vec<(u64, u64)>> {
    let held = all(status, "consumers").map(|one| {
        let bytes = |name: &str| one["stats"][name].as_u64();
        Some((bytes("pool_bytes")? / PAGE, bytes("target_bytes")? / PAGE))
    });
    held.collect()
}

/// Whether both programs have targets that the node's quota allows, and keep to them.
fn is_respected(status: &Value) -> bool {
    let quota = status["nodes"][0]["pool"]["quota_pages"].as_u64();
    let Some(found) = held_and_targets(status) else { return false };
    let targets: u64 = found.iter().map(|(_, target)| target).sum();
    found.len() == 2
        && quota == Some(LENDS_PAGES)
        && targets <= LENDS_PAGES
        && found.iter().all(|(held, target)| *held <= target + SLACK)
}

/// Sets a policy while two programs hold more of the pool than their node lends: both come to their
/// targets. After a kill the next manager has the policy, and learns the quotas from the nodes. The
/// next pager of a program learns its target, and no page of the programs is lost.
pub(crate) fn targets_are_kept_to(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("python3") {
        return Ok(Outcome::Skipped(reason));
    }
    let mut hosts = Hosts::start(&cluster.hecaton)?;
    ensure!(hosts.policy()?.is_null(), "there is a policy from the first");
    let mut programs = vec![hosts.program()?, hosts.program()?];
    hosts.eventually("each holds all that it ever evicted", |status| {
        let held = all(status, "consumers").map(|one| one["stats"]["pool_bytes"].as_u64());
        let held: Vec<u64> = held.map(|bytes| bytes.unwrap_or_default() / PAGE).collect();
        let most = LENDS_PAGES / 2 + SLACK;
        Ok(held.len() == 2 && held.iter().all(|held| *held > most && *held > PAGES * 15 / 16))
    })?;
    let limited =
        all(&hosts.status()?, "consumers").any(|one| !one["stats"]["target_bytes"].is_null());
    ensure!(!limited, "something limits a consumer where there is no policy");

    // The other node keeps all that it lends, so that the quota stays what it is.
    hosts.hecaton("policy set tlp --p 5 --reserve 256M")?;
    let policy = json!({
        "policy": "tlp", "percent": 5, "threshold_pages": 1024, "reserve_pages": 65536
    });
    ensure!(hosts.policy()? == policy, "it is {}", hosts.policy()?);
    hosts.eventually("both keep to their targets", |status| Ok(is_respected(status)))?;
    let status = hosts.status()?;
    for consumer in all(&status, "consumers") {
        let count = |name: &str| consumer["stats"][name].as_u64().unwrap_or_default();
        let (puts, within) = (count("puts_total"), count("puts_succeeded"));
        ensure!(0 < within && within < puts, "{within} of {puts} puts were within the target");
    }

    kill_dead(hosts.manager.id());
    hosts.manager.wait(PATIENCE, || Ok(()))?;
    let address = hosts.url.trim_start_matches("http://").to_owned();
    (hosts.manager, _) = start_manager(&hosts.hecaton, &hosts.scratch, &hosts.state, &address)?;
    ensure!(hosts.policy()? == policy, "the next manager has {}", hosts.policy()?);
    hosts.eventually("both still do", |status| Ok(is_respected(status)))?;
    let text = hosts.hecaton("status")?;
    ensure!(text.contains("policy tlp --p 5"), "{text}");
    ensure!(text.contains("a: may use 112M of the pool by the policy"), "{text}");

    // Pages that are in one place only are so for the next pager, too.
    let pager = all(&status, "consumers").find_map(|one| one["pid"].as_u64());
    kill_dead(u32::try_from(pager.context("there is no pager")?)?);
    hosts.eventually("the next pager does, too", |status| {
        let restarts = all(status, "consumers").filter_map(|one| one["restarts"].as_u64());
        Ok(restarts.sum::<u64>() == 1 && is_respected(status))
    })?;

    hosts.hecaton("policy set greedy-local")?;
    hosts.eventually("the policy is another", |status| {
        let nodes = status["nodes"].as_array().into_iter().flatten();
        Ok(nodes.into_iter().all(|node| node["pool"]["policy"]["policy"] == "greedy-local")
            && held_and_targets(status).is_some_and(|found| found.len() == 2))
    })?;
    hosts.hecaton("policy set none")?;
    hosts.eventually("nothing limits them", |status| {
        let mut consumers = all(status, "consumers");
        Ok(consumers.all(|one| one["stats"]["target_bytes"].is_null()))
    })?;
    for (running, output) in &mut programs {
        drop(running.child_mut().stdin.take());
        let status = running.wait(LONG, || Ok(()))?;
        let mut said = String::new();
        output.read_to_string(&mut said)?;
        ensure!(status.success() && said == "verified\n", "it ended with {status}: {said:?}");
    }
    Ok(Outcome::Passed)
}
