//! Several managers with their registry in etcd: one leads, and another one when that dies, sleeps,
//! or cannot reach etcd.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, PATIENCE, all, hecaton, log_in, scratch},
        process::{Running, Stopped, kill_dead, missing, run},
        wait::until,
    },
    programs::end_verified,
};
use anyhow::{Context as _, ensure};
use hecaton_testkit::unused_port;
use serde_json::Value;
use std::{
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

/// Members of etcd, and managers: most of them are left when one dies.
const COUNT: usize = 3;

/// Longer than a manager leads without renewing its lease.
const OVERSLEPT: Duration = Duration::from_secs(8);

/// The donor that is told something.
const DONOR: &str = "node-1";

/// Addresses for daemons that are told them.
pub(crate) fn free(count: usize) -> Vec<String> {
    (0..count).map(|_| format!("127.0.0.1:{}", unused_port())).collect()
}

/// Processes that can be killed and started again as they were.
struct Several {
    commands: Vec<Box<dyn Fn() -> anyhow::Result<Command>>>,
    running: Vec<Running>,
}

impl Several {
    fn start(commands: Vec<Box<dyn Fn() -> anyhow::Result<Command>>>) -> anyhow::Result<Several> {
        let running = commands.iter().map(|command| Running::spawn(&mut command()?));
        let running = running.collect::<anyhow::Result<_>>()?;
        Ok(Several { commands, running })
    }

    fn kill(&mut self, index: usize) -> anyhow::Result<()> {
        kill_dead(self.running[index].id());
        self.running[index].wait(PATIENCE, || Ok(()))?;
        Ok(())
    }

    fn start_again(&mut self, index: usize) -> anyhow::Result<()> {
        self.running[index] = Running::spawn(&mut self.commands[index]()?)?;
        Ok(())
    }
}

fn members(scratch: &Path, clients: &[String]) -> anyhow::Result<Several> {
    let peers: Vec<String> = free(COUNT).iter().map(|peer| format!("http://{peer}")).collect();
    let named = peers.iter().enumerate().map(|(index, peer)| format!("m{index}={peer}"));
    let initial = named.collect::<Vec<_>>().join(",");
    let commands = clients.iter().zip(peers).enumerate().map(|(index, (client, peer))| {
        let (data, initial) = (scratch.join(format!("etcd-{index}")), initial.clone());
        let client = client.clone();
        let command = move || {
            let mut command = Command::new("etcd");
            command.args(["--name", &format!("m{index}"), "--initial-cluster", &initial]);
            command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
            command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
            // The test simulates no power failure, so etcd need not sync its files.
            command.arg("--data-dir").arg(&data).arg("--unsafe-no-fsync");
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            Ok(command)
        };
        Box::new(command) as Box<dyn Fn() -> anyhow::Result<Command>>
    });
    Several::start(commands.collect())
}

/// `GET /v1/status` of one manager: what it says, or nothing if it says that it does not lead.
fn answer_of(url: &str) -> anyhow::Result<Option<Value>> {
    let agent: ureq::Agent =
        ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(2))).build().into();
    match agent.get(format!("{url}/v1/status")).call() {
        Err(ureq::Error::StatusCode(503)) => Ok(None),
        answered => Ok(Some(answered?.body_mut().read_json()?)),
    }
}

/// The epoch in which one manager leads, if it says that it does. Each that leads has a higher one
/// than those before it.
fn epoch_at(url: &str) -> Option<u64> {
    answer_of(url).ok()??["epoch"].as_u64()
}

/// Managers that lead at a time: the last of those that say so, and those that have said so before
/// it and say so after it. A slow answer counts as none.
fn leaders(urls: &[String]) -> Vec<usize> {
    let epochs = urls.iter().enumerate();
    let said: Vec<(usize, u64)> =
        epochs.filter_map(|(index, url)| Some((index, epoch_at(url)?))).collect();
    let Some(((last, _), earlier)) = said.split_last() else { return Vec::new() };
    // Where one has followed another meanwhile, that one does not lead in its epoch any more.
    let leads_on = |(index, epoch): &&(usize, u64)| epoch_at(&urls[*index]) == Some(*epoch);
    earlier.iter().filter(leads_on).map(|(index, _)| *index).chain([*last]).collect()
}

/// Waits until one of the managers leads that `may`.
fn leader(urls: &[String], may: impl Fn(usize) -> bool) -> anyhow::Result<usize> {
    until("a manager leads that may", PATIENCE, || {
        let leaders = leaders(urls);
        ensure!(leaders.len() <= 1, "managers {leaders:?} lead");
        Ok(match leaders[..] {
            [leader] if may(leader) => Ok(leader),
            _ => Err(format!("{leaders:?} lead")),
        })
    })
}

fn told_limit(status: &Value) -> Option<u64> {
    let donor = all(status, "donors").find(|donor| donor["name"] == DONOR)?;
    donor["stats"]["told_limit_bytes"].as_u64()
}

/// Kills the leader, stops the next leader for longer than its lease, and kills one member of etcd
/// and then a second. At most one manager leads at a time. The managers keep each order that one of
/// them has taken, and the policy. A program notices nothing.
pub(crate) fn take_turns() -> TestResult {
    if let Some(reason) = missing("etcd") {
        return Ok(Outcome::Skipped(reason));
    }
    let scratch = scratch()?;
    let clients: Vec<String> =
        free(COUNT).iter().map(|client| format!("http://{client}")).collect();
    let mut etcd = members(scratch.path(), &clients)?;
    let addresses = free(COUNT);
    let urls: Vec<String> = addresses.iter().map(|address| format!("http://{address}")).collect();
    let log = log_in(&scratch)?;
    let commands = addresses.into_iter().map(|address| {
        let (etcd, hecaton, log) = (clients.join(","), hecaton()?, log.try_clone()?);
        let command = move || {
            let mut command = Command::new(&hecaton);
            command.args(["manager", "--listen", &address, "--etcd", &etcd]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.try_clone()?);
            Ok(command)
        };
        Ok(Box::new(command) as Box<dyn Fn() -> anyhow::Result<Command>>)
    });
    let mut managers = Several::start(commands.collect::<anyhow::Result<_>>()?)?;
    leader(&urls, |_| true)?;

    let node = |name: &str| {
        let mut command = Command::new(hecaton()?);
        command.args(["node", "--name", name, "--lend", "300M", "--manager", &urls.join(",")]);
        command.args(["--adopt-within", "0", "--dir"]).arg(scratch.path().join(name));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.try_clone()?);
        Running::spawn(&mut command)
    };
    let mut second = node("node-2")?;
    let first = node(DONOR)?;
    let cluster = Cluster::of(urls.join(","), Vec::new(), first, scratch)?;
    cluster.wait_for_donors(2)?;
    let mut program = cluster.command("run");
    program.args(["--local", "16M", "--mirror", "2", "--"]);
    program.arg(env!("CARGO_BIN_EXE_verify-threads")).args(["1", "8000"]);
    program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log.try_clone()?);
    let mut program = Running::spawn(&mut program)?;
    // It finds its node through the manager that leads.
    cluster.eventually("the program runs", PATIENCE, |status| {
        Ok(all(status, "consumers").any(|one| one["state"] == "serving"))
    })?;

    let policy = |words: &[&str]| -> anyhow::Result<String> {
        let ended = run(cluster.command("policy").args(words), PATIENCE)?;
        ended.expect_success("policy")?;
        Ok(ended.text())
    };
    policy(&["set", "tlp", "--p", "5"])?;
    let set = policy(&["show", "--json"])?;
    ensure!(set.contains("tlp"), "{set}");

    // Taken, and not told to the donor by this manager any more.
    let killed = leader(&urls, |_| true)?;
    let limit = format!("{}/v1/donors/{DONOR}/limit", urls[killed]);
    ureq::put(format!("{limit}?bytes={}", 250 << 20)).send_empty().context("an order")?;
    managers.kill(killed)?;
    cluster.status().context("a command while nobody leads")?;
    leader(&urls, |index| index != killed)?;
    cluster.eventually("the order is carried out", PATIENCE, |status| {
        Ok(told_limit(status) == Some(250 << 20))
    })?;

    ensure!(policy(&["show", "--json"])? == set, "the next leader has another policy");

    let (sleeper, before) = until("the leader tells its epoch", PATIENCE, || {
        let current = leader(&urls, |_| true)?;
        Ok(epoch_at(&urls[current]).map(|epoch| (current, epoch)).ok_or("it does not answer"))
    })?;
    let stopped = Stopped::stop(managers.running[sleeper].id());
    leader(&urls, |index| index != sleeper)?;
    thread::sleep(OVERSLEPT);
    drop(stopped);
    until("the one that has slept says that it does not lead", PATIENCE, || {
        let answer = match answer_of(&urls[sleeper]) {
            Ok(answer) => answer,
            Err(error) => return Ok(Err(format!("{error:#}"))),
        };
        // It may be its turn again.
        let epoch = answer.and_then(|status| status["epoch"].as_u64());
        ensure!(epoch != Some(before), "after it has slept, it leads on");
        Ok(Ok(()))
    })?;
    for _ in 0..20 {
        let leaders = leaders(&urls);
        ensure!(leaders.len() <= 1, "after one has slept, {leaders:?} lead");
    }
    leader(&urls, |_| true)?;
    managers.start_again(killed)?;

    etcd.kill(0)?;
    cluster.eventually("all nodes are up, with most of etcd", PATIENCE, |status| {
        let mut nodes = status["nodes"].as_array().into_iter().flatten();
        Ok(nodes.all(|node| node["state"] == "up"))
    })?;
    // A manager answers 503 while etcd elects its own leader: retry, as commands do.
    until("an order is taken with most of etcd", PATIENCE, || {
        let current = leader(&urls, |_| true)?;
        match ureq::delete(format!("{}/v1/donors/{DONOR}/limit", urls[current])).call() {
            Err(error @ ureq::Error::StatusCode(503)) => Ok(Err(error)),
            answered => Ok(Ok(answered.map(drop)?)),
        }
    })?;
    cluster.eventually("that order is carried out", PATIENCE, |status| {
        Ok(told_limit(status).is_none())
    })?;

    etcd.kill(1)?;
    until("no manager leads without most of etcd", PATIENCE, || {
        let leaders = leaders(&urls);
        Ok(if leaders.is_empty() { Ok(()) } else { Err(format!("{leaders:?} lead")) })
    })?;
    etcd.start_again(0)?;
    etcd.start_again(1)?;
    leader(&urls, |_| true).context("with all of etcd again")?;
    ensure!(policy(&["show", "--json"])? == set, "etcd does not have the policy any more");
    policy(&["set", "none"])?;
    cluster.wait_for_donors(2)?;

    end_verified(&cluster, &mut program)?;
    cluster.wait_until_idle(PATIENCE)?;
    second.signal(rustix::process::Signal::TERM);
    second.wait(PATIENCE, || Ok(()))?;
    Ok(Outcome::Passed)
}
