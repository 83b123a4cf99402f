//! Divides a part of this host's memory among real VMs through a node's agent.
//! `hecaton vm create` starts the VMs, and the tests kill the agent in between.
//!
//! The guests are emulated: the agent evicts no VM for being slow, and the tests time nothing.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, PATIENCE, all, eventually},
        guest::{GUEST_PATIENCE, Guests, Machine, Qemu},
        process::{Running, kill_dead, run},
    },
    memory_files::{held, pages_full_of},
    restart::start_manager,
};
use anyhow::{Context as _, ensure};
use serde_json::Value;
use std::{
    ffi::OsString,
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

pub(crate) const M: u64 = 1 << 20;

/// The guest says when it is there, and when it has been given more than 800 MiB.
const SCRIPT: &str = "has() { awk '/^MemTotal/ {print int($2 / 1024)}' /proc/meminfo; }
    echo guest: waits
    while [ $(has) -le 800 ]; do sleep 1; done
    echo guest: has grown; sleep 3600";

/// The guest's kernel puts plugged memory into its movable zone, from the first block on.
const KERNEL: &str = " memhp_default_state=online_movable";

/// A node with an agent that has 1280 MiB of this host, 64 of which nobody harvests.
pub(crate) struct Host<'a> {
    cluster: &'a Cluster,
    /// None while it is killed. Before its manager.
    node: Option<Running>,
    manager: String,
    _manager: Running,
    /// Further arguments of the node.
    arguments: &'a [&'a str],
    /// A command that starts it, which comes after; nothing starts it by itself.
    before: Vec<OsString>,
}

impl<'a> Host<'a> {
    fn start(cluster: &'a Cluster) -> anyhow::Result<Self> {
        Self::start_with(cluster, &[])
    }

    pub(crate) fn start_with(cluster: &'a Cluster, more: &'a [&'a str]) -> anyhow::Result<Self> {
        Self::start_by(cluster, more, Vec::new())
    }

    pub(crate) fn start_by(
        cluster: &'a Cluster,
        arguments: &'a [&'a str],
        before: Vec<OsString>,
    ) -> anyhow::Result<Self> {
        // With its own manager, this node lends nothing to programs of the test's cluster.
        let (running, manager) = start_manager(&cluster.hecaton, "127.0.0.1:0")?;
        let mut host = Host { cluster, node: None, manager, _manager: running, arguments, before };
        host.start_node()?;
        Ok(host)
    }

    pub(crate) fn start_node(&mut self) -> anyhow::Result<()> {
        let mut command = self.node_command("agent-host", "agent-node")?;
        self.node = Some(Running::spawn(&mut command)?);
        self.eventually("the agent has looked", PATIENCE, |_| Ok(true))
    }

    /// The same, with these further arguments from now on.
    pub(crate) fn start_node_with(&mut self, arguments: &'a [&'a str]) -> anyhow::Result<()> {
        self.arguments = arguments;
        self.start_node()
    }

    fn node_command(&self, name: &str, dir: &str) -> anyhow::Result<Command> {
        let hecaton = self.cluster.hecaton.clone().into_os_string();
        let mut words = self.before.iter().chain([&hecaton]);
        let mut command = Command::new(words.next().context("no command")?);
        command.args(words).args(["node", "--name", name, "--manager", &self.manager, "--dir"]);
        command.arg(self.cluster.file(dir)).args(self.arguments).arg("--agent");
        command.args(["--manage", "1280M", "--qmp-dir"]).arg(self.vms());
        command.args(["--buffer", "64M", "--batch", "128M"]);
        if !self.arguments.contains(&"--reclaim-patience") {
            // Emulated guests on a busy machine are slow, and are not to be evicted for it.
            command.args(["--reclaim-patience", "400", "--reclaim-time", "400"]);
            command.args(["--guest-patience", "200"]);
        }
        // No longer than a failed test leaves its donor.
        command.args(["--adopt-within", "120"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(self.cluster.log()?);
        Ok(command)
    }

    pub(crate) fn vms(&self) -> PathBuf {
        self.cluster.file("vms")
    }

    /// SIGKILL.
    pub(crate) fn kill_node(&mut self) -> anyhow::Result<()> {
        let mut node = self.node.take().context("there is no node")?;
        kill_dead(node.id());
        node.wait(PATIENCE, || Ok(())).map(drop)
    }

    /// `hecaton vm create` with these arguments, ready for the machine's own.
    pub(crate) fn create(&self, arguments: &[&str]) -> Command {
        let mut command = self.cluster.command("vm");
        command.arg("create").args(arguments).arg("--dir").arg(self.cluster.file("agent-node"));
        command.arg("--");
        command
    }

    fn machine(&self, guests: &Guests, name: &str, arguments: &[&str]) -> anyhow::Result<Machine> {
        self.machine_with(guests, name, arguments, SCRIPT)
    }

    fn machine_with(
        &self,
        guests: &Guests,
        name: &str,
        arguments: &[&str],
        script: &str,
    ) -> anyhow::Result<Machine> {
        self.machine_of(guests, name, arguments, script, &[])
    }

    /// `own`: further arguments of its QEMU.
    fn machine_of(
        &self,
        guests: &Guests,
        name: &str,
        arguments: &[&str],
        script: &str,
        own: &[&str],
    ) -> anyhow::Result<Machine> {
        self.machine_by(guests.command_line(Qemu::Backports, script), name, arguments, own)
    }

    /// `words`: what starts QEMU, and a guest's arguments.
    pub(crate) fn machine_by(
        &self,
        mut words: Vec<OsString>,
        name: &str,
        arguments: &[&str],
        own: &[&str],
    ) -> anyhow::Result<Machine> {
        let mut command = self.create(&[&["--name", name], arguments].concat());
        let append = words.iter().position(|word| word == "-append");
        words[append.context("QEMU has no kernel line")? + 1].push(KERNEL);
        command.args(words).arg("-no-reboot").args(own);
        Machine::spawn(name, command, self.vms().join(format!("{name}.qmp")))
    }

    /// Returns the output of `hecaton host status --json`.
    pub(crate) fn status(&self) -> anyhow::Result<Value> {
        let mut command = self.cluster.command("host");
        command.args(["status", "--json", "--dir"]).arg(self.cluster.file("agent-node"));
        let ended = run(&mut command, PATIENCE)?;
        ended.expect_success("hecaton host status")?;
        Ok(serde_json::from_slice(&ended.stdout)?)
    }

    /// Returns the manager's status of the cluster, whose only node is this one.
    fn manager_status(&self) -> anyhow::Result<Value> {
        let mut command = Command::new(&self.cluster.hecaton);
        let ended = run(command.args(["status", "--json", "--manager", &self.manager]), PATIENCE)?;
        Ok(serde_json::from_slice(&ended.stdout)?)
    }

    /// Waits until the agent's status satisfies `holds`.
    pub(crate) fn eventually(
        &self,
        what: &str,
        patience: Duration,
        holds: impl Fn(&Value) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        eventually(|| self.status(), what, patience, holds)
    }

    /// Returns the entry of one VM in the agent's status.
    fn machine_status(&self, name: &str) -> anyhow::Result<Value> {
        let status = self.status()?;
        let machines = status["machines"].as_array().context("no machines")?;
        let machine = machines.iter().find(|machine| machine["name"] == name);
        machine.cloned().with_context(|| format!("{name} is not there: {status}"))
    }

    pub(crate) fn machine_pid(&self, name: &str) -> anyhow::Result<u32> {
        let pid = self.machine_status(name)?["pid"].as_u64();
        Ok(u32::try_from(pid.with_context(|| format!("{name} has no process"))?)?)
    }

    /// How long a machine waited for its memory, in milliseconds, if this agent knows it.
    fn waited_ms(&self, name: &str) -> anyhow::Result<Option<u64>> {
        Ok(self.machine_status(name)?["waited_ms"].as_u64())
    }

    /// The agent has heard the manager in the guest, and will wait for it.
    fn hears_the_guest(&self) -> anyhow::Result<()> {
        self.eventually("the manager in the guest has greeted", GUEST_PATIENCE, |status| {
            Ok(status["machines"][0]["guest_listens"] == true)
        })
    }

    /// A program borrows memory that a harvest VM had. The memory must hold no page of that VM.
    fn lends_nothing_of_it(&self) -> anyhow::Result<()> {
        let wanted = Some(512 * M);
        self.eventually("it lends what the machine had", GUEST_PATIENCE, |status| {
            Ok(status["nodes"][0]["lent_free_bytes"].as_u64() >= wanted)
        })?;
        // The agent counts as lent what its donor hears of next.
        let of_manager = || self.manager_status();
        eventually(of_manager, "its donor knows that", PATIENCE, |status| {
            Ok(all(status, "donors").any(|one| one["stats"]["told_limit_bytes"].as_u64() >= wanted))
        })?;
        let fills = format!("my $x = '{LENT}' x 4194304; print \"full\\n\"; sleep 600");
        let mut command = self.cluster.command("run");
        command.args(["--local", "16M", "--dir"]).arg(self.cluster.file("agent-node"));
        command.args(["--", "perl", "-e"]).arg(format!("$| = 1; {fills}"));
        let mut program = Running::spawn(command.stdout(Stdio::piped()))?;
        let output = program.output()?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line == "full\n", "the program says {line:?}");
        let status = self.manager_status()?;
        let donor = all(&status, "donors").next().context("there is no donor")?;
        let pid = u32::try_from(donor["pid"].as_u64().context("it has no process")?)?;
        let (lent, left) = (pages_full_of(pid, LENT)?, pages_full_of(pid, PATTERN)?);
        ensure!(lent > 10_000, "only {lent} pages are on lent memory");
        ensure!(left == 0, "{left} pages of a harvest VM are lent");
        Ok(())
    }

    /// Waits until the harvest VM has so many MiB beyond its minimum, and others so many in all.
    pub(crate) fn until(&self, what: &str, harvested: u64, regular: u64) -> anyhow::Result<()> {
        self.eventually(what, GUEST_PATIENCE, |status| {
            let machines = status["machines"].as_array().context("no machines")?;
            let harvest = machines.iter().find(|machine| machine["kind"] == "harvest");
            let harvest = harvest.with_context(|| format!("it is gone: {status}"))?;
            let others: u64 = machines
                .iter()
                .filter(|machine| machine["kind"] == "regular")
                .filter_map(|machine| machine["base_bytes"].as_u64())
                .sum();
            Ok(harvest["harvested_bytes"] == harvested * M
                && harvest["state"] == "running"
                && others == regular * M)
        })?;
        println!("    {what}: {harvested} MiB harvested, {regular} MiB of regular VMs");
        Ok(())
    }
}

/// Harvest VMs fill their memory with copies of this text: 32 bytes with its newline.
const PATTERN: &str = "of a harvest VM and nobody else";

/// Programs fill lent memory with copies of this text: 32 bytes.
const LENT: &str = "this is a program on lent memory";

const CLASSES: [&str; 10] = [
    "system_bytes",
    "regular_bytes",
    "minimum_bytes",
    "lent_used_bytes",
    "harvested_bytes",
    "ephemeral_bytes",
    "lent_free_bytes",
    "reserved_bytes",
    "buffer_bytes",
    "unassigned_bytes",
];

/// Every byte is somebody's, and nobody's twice.
pub(crate) fn adds_up(status: &Value) -> anyhow::Result<()> {
    for node in status["nodes"].as_array().context("no nodes")? {
        let bytes = |class: &str| node[class].as_u64().context("a class is missing");
        let mut sum = bytes("unmanaged_bytes")?;
        for class in CLASSES {
            sum += bytes(class)?;
        }
        ensure!(sum == bytes("host_bytes")?, "it does not add up: {node}");
        ensure!(bytes("overdrawn_bytes")? == 0, "something is promised twice: {node}");
    }
    Ok(())
}

/// A harvest VM grows into free memory, and shrinks before a regular VM starts. When the agent is
/// killed, the next agent admits a VM that waits, and notices one that has left.
pub(crate) fn it_divides_a_host_and_is_killed(cluster: &Cluster, guests: &Guests) -> TestResult {
    let mut host = Host::start(cluster)?;
    let mut harvest =
        host.machine(guests, "harvest", &["--harvest", "--min", "256M", "--max", "1G"])?;
    harvest.wait_for("guest: waits")?;
    host.until("alone, it has its maximum", 768, 0)?;
    harvest.wait_for("guest: has grown")?;

    let mut first = host.machine(guests, "first", &["--regular", "--memory", "512M"])?;
    first.wait_for("guest: waits")?;
    host.until("a regular VM has come", 448, 512)?;
    let waited = (host.waited_ms("harvest")?, host.waited_ms("first")?);
    ensure!(waited.0 == Some(0) && waited.1 > Some(0), "they waited {waited:?} ms");

    // Nobody is there to hear of it, and then somebody else.
    let mut second = host.machine(guests, "second", &["--regular", "--memory", "256M"])?;
    host.eventually("it has asked", PATIENCE, |status| {
        Ok(status.to_string().contains("\"second\""))
    })?;
    host.kill_node()?;
    host.start_node()?;
    second.wait_for("guest: waits")?;
    host.until("another one has come, over the kill of the agent", 192, 768)?;
    ensure!(host.waited_ms("first")?.is_none(), "the next agent knows of its waiting");

    host.kill_node()?;
    drop(first);
    host.start_node()?;
    host.until("one has left while no agent was there", 704, 256)?;
    drop(second);
    host.until("all have left", 768, 0)?;
    let mut left: Vec<_> = fs::read_dir(host.vms())?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<anyhow::Result<_>>()?;
    left.sort();
    let rest = ["agent.lock", "harvest.guest", "harvest.json", "harvest.qmp"];
    ensure!(left == rest, "{left:?} are left");
    Ok(Outcome::Passed)
}

/// The manager inside: its one application says what it is told, and how much the guest has then.
const MANAGED: &str =
    "hecaton guest --config /guest.toml --port /dev/$(ls /sys/class/virtio-ports)";

const MANAGER: &str = r#"
reserve = "64M"
patience-s = 200

[[application]]
name = "all"
hook = { command = ["/bin/told"], timeout-s = 200 }
"#;

const TOLD: &str = r#"#!/bin/sh
has=$(awk '/^MemTotal/ { print $2 * 1024 }' /proc/meminfo)
# What the manager has readied is not taken yet.
has=$((has + $(grep -l offline /sys/devices/system/memory/memory*/state | wc -l) * (128 << 20)))
echo "guest: told $HECATON_REASON $HECATON_DEADLINE_MS $HECATON_TARGET_BYTES $has" >/dev/ttyS0
if [ "$HECATON_REASON" = eviction ] && [ -e /tmp/obeys ]; then poweroff -f; fi
"#;

/// The guest with `hecaton guest` in it, in a directory of this name.
fn managed(cluster: &Cluster, guests: &Guests, name: &str) -> anyhow::Result<Guests> {
    let files = [("guest.toml", MANAGER), ("bin/told", TOLD)];
    guests.with(cluster.file(name), &cluster.hecaton, &files)
}

/// A guest learns its new size before its first block goes, and its applications give memory back
/// first. The next agent goes on with this guest.
pub(crate) fn a_guest_is_told_before_it_shrinks(cluster: &Cluster, guests: &Guests) -> TestResult {
    let guests = managed(cluster, guests, "managed")?;
    let mut host = Host::start(cluster)?;
    let arguments = ["--harvest", "--min", "384M", "--max", "1G"];
    let mut harvest = host.machine_with(&guests, "harvest", &arguments, MANAGED)?;
    harvest.wait_for("guest: told start")?;
    host.until("alone, it has its maximum", 640, 0)?;
    host.hears_the_guest()?;

    let first = host.machine(&guests, "first", &["--regular", "--memory", "512M"])?;
    is_told(&mut harvest, 704)?;
    host.until("a regular VM has come", 320, 512)?;

    // The next agent is greeted while the guest grows.
    host.kill_node()?;
    drop(first);
    host.start_node()?;
    harvest.wait_for("guest: told grow")?;
    host.until("it has left", 640, 0)?;
    host.hears_the_guest()?;
    let _second = host.machine(&guests, "second", &["--regular", "--memory", "256M"])?;
    is_told(&mut harvest, 960)?;
    host.until("another one has come, and another agent", 576, 256)?;
    Ok(Outcome::Passed)
}

/// Waits until the guest's application is told to shrink to `mib` MiB less what the kernel keeps.
/// The guest must still be larger at that moment.
fn is_told(harvest: &mut Machine, mib: u64) -> anyhow::Result<()> {
    // An order that overtakes the first one is the application's first, whose reason is `start`.
    let line = harvest.wait_for("guest: told s")?;
    let mut numbers = line.split(' ').rev().map(str::parse::<u64>);
    let (has, target) = (numbers.next(), numbers.next());
    let (has, target) = (has.context("no size")??, target.context("no target")??);
    // The kernel does not count what it needs for itself.
    ensure!((mib - 128) * M < target && target <= mib * M, "it was told another size: {line}");
    ensure!(has > target, "it was told when it had shrunk already: {line}");
    Ok(())
}

/// A regular VM that needs a harvest VM's minimum gets it. The agent warns the guest, which shuts
/// down or is killed at its deadline; only then does the regular VM start. A new request for the
/// harvest VM waits for room, and after a kill for at least a minute. With `--restart` the launcher
/// repeats the request until it is told to end. `hecaton host watch` records all of this, over the
/// kill of the agent, which comes between a warning and its deadline.
///
/// A killed VM leaves its memory full of a pattern. Neither the next VM's memory nor the memory
/// that the node lends holds a page of it.
pub(crate) fn a_regular_vm_evicts_a_harvest_vm(cluster: &Cluster, guests: &Guests) -> TestResult {
    let guests = managed(cluster, guests, "evicted")?;
    let mut host = Host::start_with(cluster, &["--eviction-warning", "400", "--lend", "1G"])?;
    let recording = cluster.file("host.jsonl");
    let mut watch = cluster.command("host");
    watch.args(["watch", "--json", "--dir"]).arg(cluster.file("agent-node"));
    let watch = Running::spawn(watch.stdout(fs::File::create(&recording)?))?;
    let harvest = |host: &Host<'_>, script: &str, more: &[&str]| {
        let arguments = ["--harvest", "--min", "384M", "--max", "512M"];
        host.machine_with(&guests, "harvest", &[&arguments, more].concat(), script)
    };
    let waits = |host: &Host<'_>, what: &str, state: &str| {
        host.eventually(what, PATIENCE, |status| {
            adds_up(status)?;
            let waiting = &status["waiting"][0];
            Ok(waiting["name"] == "harvest" && waiting["waits"]["waits"] == state)
        })
    };
    let evictions = |host: &Host<'_>| {
        let status = host.status()?;
        adds_up(&status)?;
        let counters = &status["counters"];
        anyhow::Ok((counters["warned"].as_u64(), counters["evicted"][0].as_u64()))
    };

    let mut obedient = harvest(&host, &format!("touch /tmp/obeys; {MANAGED}"), &[])?;
    obedient.wait_for("guest: told start")?;
    host.until("alone, it has its maximum", 128, 0)?;
    let mut first = host.machine(&guests, "first", &["--regular", "--memory", "1G"])?;
    let line = obedient.wait_for("guest: told eviction")?;
    let left_ms: u64 = line.split(' ').nth(3).context("no deadline")?.parse()?;
    ensure!((1..=400_000).contains(&left_ms), "it was told another deadline: {line}");
    obedient.end()?;
    first.wait_for("guest: waits")?;
    let seen = evictions(&host)?;
    ensure!(seen == (Some(1), Some(0)), "it was not let go: {seen:?}");

    let fills = format!("yes '{PATTERN}' | head -c {} >/tmp/full; {MANAGED}", 96 * M);
    let mut stubborn = harvest(&host, &fills, &["--restart"])?;
    waits(&host, "it waits for room", "for-room")?;
    drop(first);
    stubborn.wait_for("guest: told start")?;
    host.until("it is back", 128, 0)?;
    let filled = host.machine_pid("harvest")?;
    let pages = pages_full_of(filled, PATTERN)?;
    ensure!(pages > 20_000, "only {pages} pages of its memory have what it has written");
    let mut second = host.machine(&guests, "second", &["--regular", "--memory", "1G"])?;
    stubborn.wait_for("guest: told eviction")?;
    ensure!(!second.has_said("guest: ready"), "two have the same memory");
    // The next agent warns it anew, and kills it soon.
    host.kill_node()?;
    host.start_node_with(&["--eviction-warning", "15", "--lend", "1G"])?;
    host.eventually("its deadline is over", PATIENCE, |status| {
        Ok(status["counters"]["evicted"][0] == 1)
    })?;
    waits(&host, "it is kept away for a while", "after-eviction")?;
    let status = host.status()?;
    let gave_way = &status["gave_way"][0];
    ensure!(gave_way["name"] == "harvest" && gave_way["pid"] == filled, "{status}");
    second.wait_for("guest: waits")?;
    let seen = evictions(&host)?;
    ensure!(seen == (Some(1), Some(1)), "it was not killed: {seen:?}");
    let pages = pages_full_of(host.machine_pid("second")?, PATTERN)?;
    ensure!(pages == 0, "{pages} pages of the harvest VM are in a regular VM's memory");
    drop(second);
    host.lends_nothing_of_it()?;
    host.eventually("it is back by itself", GUEST_PATIENCE, |status| {
        Ok(status["machines"][0]["name"] == "harvest")
    })?;
    // Told to end, it does.
    drop(stubborn);
    host.eventually("it has ended for good", PATIENCE, |status| {
        Ok(status["machines"][0].is_null() && status["waiting"][0].is_null())
    })?;
    drop(watch);

    let html = cluster.file("host.html");
    let mut plot = cluster.command("host");
    let ended = run(plot.arg("plot").arg(&recording).arg("--html").arg(&html), PATIENCE)?;
    ended.expect_success("hecaton host plot")?;
    let page = fs::read_to_string(&html)?;
    for event in ["is warned", "is evicted", "has left"] {
        ensure!(page.contains(event), "nothing {event}: {page}");
    }
    Ok(Outcome::Passed)
}

/// The guest fills 400 MiB for a while, and then has 700 MiB in its page cache. Only a balloon
/// makes the guest give that cache up.
const BALLOONED: &str = "has() { awk '/^MemTotal/ {print int($2 / 1024)}' /proc/meminfo; }
    next() { echo guest: $1; read -r word </dev/ttyS0; }
    caches() { dd if=/dev/vda of=/dev/null bs=1M 2>/dev/null; }
    mount -o remount,size=600M /tmp
    dd if=/dev/zero of=/tmp/full bs=1M count=400 2>/dev/null; next full
    rm /tmp/full; next empty
    # Whoever closes a disk last drops its cache.
    exec 3</dev/vda
    caches; echo guest: caches
    while [ $(has) -gt 720 ]; do sleep 1; done; echo guest: has shrunk
    while [ $(has) -lt 900 ]; do sleep 1; done; caches; echo guest: has grown; sleep 3600";

/// A VM without virtio-mem starts once its maximum fits, and gives memory back by its balloon.
/// The test measures how much of the VM's memory file is in the host's memory.
pub(crate) fn a_machine_shrinks_by_its_balloon(cluster: &Cluster, guests: &Guests) -> TestResult {
    let mut host = Host::start(cluster)?;
    let disk = cluster.file("balloon.img");
    fs::File::create(&disk)?.set_len(700 * M)?;
    let drive = format!("file={},format=raw,if=virtio,read-only=on", disk.display());
    let mut early = host.create(&["--regular", "--memory", "512M"]);
    let early = Running::spawn(early.arg(sleeping_qemu(cluster)?).stdout(Stdio::null()))?;
    host.eventually("it is there", PATIENCE, |status| {
        Ok(status["nodes"][0]["regular_bytes"] == 512 * M)
    })?;
    let arguments = ["--harvest", "--balloon", "--min", "256M", "--max", "1G"];
    let own = ["-drive", &drive];
    let mut harvest = host.machine_of(guests, "harvest", &arguments, BALLOONED, &own)?;
    host.eventually("there is no room for its maximum", PATIENCE, |status| {
        let waiting = &status["waiting"][0];
        Ok(waiting["bytes"] == 1024 * M && waiting["waits"]["waits"] == "for-room")
    })?;
    drop(early);
    harvest.wait_for("guest: full")?;
    host.until("alone, it has its maximum", 768, 0)?;
    let pid = host.machine_pid("harvest")?;

    let full = held(pid)?;
    harvest.say("")?;
    harvest.wait_for("guest: empty")?;
    let left = || anyhow::Ok(Value::from(held(pid)?));
    eventually(left, "what it has freed is reported", GUEST_PATIENCE, |left| {
        Ok(left.as_u64() < full.checked_sub(300 * M))
    })?;
    harvest.say("")?;
    harvest.wait_for("guest: caches")?;
    let cached = held(pid)?;
    ensure!(cached > 704 * M, "it uses no more than {cached} bytes");

    let mut first = host.machine(guests, "first", &["--regular", "--memory", "512M"])?;
    host.until("a regular VM has come", 448, 512)?;
    let left = held(pid)?;
    println!("    on this host: {} MiB before, {} MiB after", cached / M, left / M);
    ensure!(left <= 704 * M, "{left} bytes are still in memory");
    harvest.wait_for("guest: has shrunk")?;
    first.wait_for("guest: waits")?;

    host.kill_node()?;
    host.start_node()?;
    host.until("the next agent finds it as it is", 448, 512)?;
    adds_up(&host.status()?)?;
    drop(first);
    host.until("all have left", 768, 0)?;
    harvest.wait_for("guest: has grown")?;
    let again = held(pid)?;
    ensure!(again > 704 * M, "it uses no more than {again} bytes again");
    Ok(Outcome::Passed)
}

/// No QEMU at all: what a machine was promised counts from its admission.
pub(crate) fn sleeping_qemu(cluster: &Cluster) -> anyhow::Result<PathBuf> {
    let fake = cluster.file("sleeping-qemu");
    fs::write(&fake, "#!/bin/sh\nexec sleep 600\n")?;
    fs::set_permissions(&fake, fs::Permissions::from_mode(0o755))?;
    Ok(fake)
}

/// A VM whose monitor is silent keeps its memory, and the agent still admits other VMs.
pub(crate) fn a_silent_machine_stalls_nobody(cluster: &Cluster, guests: &Guests) -> TestResult {
    let host = Host::start(cluster)?;
    let mut harvest =
        host.machine(guests, "harvest", &["--harvest", "--min", "256M", "--max", "512M"])?;
    harvest.wait_for("guest: waits")?;
    host.until("it has its maximum", 256, 0)?;
    let status = host.status()?;
    let pid = status["machines"][0]["pid"].as_u64().context("it has no process")?;
    let stopped = crate::harness::process::Stopped::stop(u32::try_from(pid)?);
    host.eventually("it is known to be silent", PATIENCE, |status| {
        Ok(status["machines"][0]["state"] == "silent")
    })?;
    let mut other = host.machine(guests, "other", &["--regular", "--memory", "512M"])?;
    other.wait_for("guest: waits")?;
    let status = host.status()?;
    ensure!(status["nodes"][0]["harvested_bytes"] == 256 * M, "it counts no longer: {status}");
    drop(stopped);
    host.until("it answers again", 256, 512)?;
    Ok(Outcome::Passed)
}

/// The node lends the memory that VMs leave free, and shrinks it for them. No guest is needed.
pub(crate) fn what_the_node_lends_gives_way(cluster: &Cluster) -> TestResult {
    let mut host = Host::start_with(cluster, &["--lend", "1G"])?;
    let lends = |host: &Host<'_>, mib: u64, what: &str| {
        host.eventually(what, PATIENCE, |status| {
            adds_up(status)?;
            Ok(status["nodes"][0]["lent_free_bytes"] == mib * M)
        })
    };
    lends(&host, 1024, "it lends all that it may")?;
    let mut command = host.create(&["--regular", "--memory", "768M"]);
    let machine = Running::spawn(command.arg(sleeping_qemu(cluster)?).stdout(Stdio::null()))?;
    lends(&host, 448, "it lends what the machine and the buffer leave")?;
    // The donor knows it as well, and outlives its node.
    host.kill_node()?;
    host.start_node()?;
    lends(&host, 448, "it lends no more after the kill of the node")?;
    // Which the manager hears with one of the next heartbeats.
    let of_manager = || host.manager_status();
    eventually(of_manager, "the donor has been told", PATIENCE, |status| {
        Ok(all(status, "donors").any(|donor| donor["stats"]["told_limit_bytes"] == 448 * M))
    })?;
    drop(machine);
    lends(&host, 1024, "it lends all again")?;
    Ok(Outcome::Passed)
}

/// The quota of harvest VMs holds cluster-wide, also after a node is killed. No guest is needed.
pub(crate) fn a_quota_of_harvest_vms_is_kept(cluster: &Cluster) -> TestResult {
    let mut host = Host::start(cluster)?;
    let fake = cluster.file("growing-qemu");
    let script =
        "#!/bin/sh\n[ \"$1\" = -device ] && echo virtio-mem-pci options: && exit\nexec sleep 600\n";
    fs::write(&fake, script)?;
    fs::set_permissions(&fake, fs::Permissions::from_mode(0o755))?;
    let start = |host: &Host<'_>, name: &str| {
        let arguments = ["--name", name, "--harvest", "--min", "64M", "--max", "64M"];
        Running::spawn(host.create(&arguments).arg(&fake).stdout(Stdio::null()))
    };
    let quota = |host: &Host<'_>, arguments: &[&str]| {
        let mut command = Command::new(&cluster.hecaton);
        command.args(["policy", "harvest-quota", "--manager", &host.manager]).args(arguments);
        let ended = run(&mut command, PATIENCE)?;
        ended.expect_success("hecaton policy harvest-quota")?;
        anyhow::Ok(String::from_utf8_lossy(&ended.stdout).into_owned())
    };
    // Waits until just these VMs run and these wait for the quota; at no time may more VMs run.
    let is_so = |host: &Host<'_>, what: &str, there: &[&str], waiting: &[&str]| {
        host.eventually(what, PATIENCE, |status| {
            let name = |one: &Value| one["name"].as_str().unwrap_or_default().to_owned();
            let names = |list: &str| status[list].as_array().into_iter().flatten().map(name);
            let waits = |one: &Value| one["waits"]["waits"] == "for-quota";
            let machines: Vec<String> = names("machines").collect();
            ensure!(machines.len() <= there.len(), "more than {there:?}: {status}");
            Ok(machines == there
                && names("waiting").eq(waiting.iter().copied())
                && status["waiting"].as_array().into_iter().flatten().all(waits))
        })
    };
    quota(&host, &["1"])?;
    host.eventually("the quota has come", PATIENCE, |status| {
        Ok(status["harvest"]["word"]["grant"]["quota"] == 1)
    })?;
    let first = start(&host, "first")?;
    is_so(&host, "the first is there", &["first"], &[])?;
    let second = start(&host, "second")?;
    is_so(&host, "the second waits", &["first"], &["second"])?;
    host.kill_node()?;
    host.start_node()?;
    is_so(&host, "so it does with the next agent", &["first"], &["second"])?;
    let shown: Value = serde_json::from_str(&quota(&host, &["--json"])?)?;
    ensure!(shown["harvest"]["quota"] == 1 && shown["harvest"]["counted"] == 1, "{shown}");
    drop(first);
    is_so(&host, "it has the other's place", &["second"], &[])?;
    let third = start(&host, "third")?;
    is_so(&host, "the third waits", &["second"], &["third"])?;
    quota(&host, &["none"])?;
    is_so(&host, "without a quota it does not", &["second", "third"], &[])?;
    drop((second, third));
    Ok(Outcome::Passed)
}

/// The command refuses an impossible request with a clear message, and starts no VM.
pub(crate) fn what_cannot_be_is_refused(cluster: &Cluster) -> TestResult {
    let host = Host::start(cluster)?;
    // A QEMU without virtio-mem and virtio-balloon, which says that it was started.
    let started = cluster.file("started");
    let fake = cluster.file("fake-qemu");
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in '-device virtio-'*-pci,help) exit 1;; esac\ntouch {}\n",
        started.display()
    );
    fs::write(&fake, script)?;
    fs::set_permissions(&fake, fs::Permissions::from_mode(0o755))?;
    for (arguments, own, words) in [
        (
            &["--harvest", "--min", "2G", "--max", "1G"][..],
            &[][..],
            "2G is more than the maximum of 1G",
        ),
        (&["--regular", "--memory", "3M"], &[], "take 2M or 4M"),
        (&["--harvest", "--min", "256M", "--max", "513M"], &[], "take 512M or 514M"),
        (&["--regular"], &[], "give --memory SIZE"),
        (&["--harvest", "--min", "256M"], &[], "a harvest VM needs both"),
        (&["--regular", "--memory", "64M"], &["-m", "1G"], "-m 1G: how much memory"),
        (&["--harvest", "--min", "64M", "--max", "1G"], &[], "has no virtio-mem-pci"),
        (
            &["--harvest", "--balloon", "--min", "64M", "--max", "1G"],
            &[],
            "has no virtio-balloon-pci with free-page reporting",
        ),
        (
            &["--harvest", "--balloon", "--min", "64M", "--max", "1G"],
            &["-device", "virtio-balloon-pci"],
            "-device virtio-balloon-pci: how much memory",
        ),
        (&["--regular", "--memory", "64M", "--balloon"], &[], "give --harvest"),
        (&["--regular", "--memory", "64M", "--numa", "77"], &[], "no NUMA node 77"),
        (&["--regular", "--memory", "2G"], &[], "choose another host"),
        (&["--regular", "--memory", "64M", "--name", "a/b"], &[], "cannot be a name"),
    ] {
        let ended = run(host.create(arguments).arg(&fake).args(own), PATIENCE)?;
        ensure!(!ended.status.success(), "{arguments:?} is taken");
        ensure!(ended.stderr.contains(words), "{arguments:?}: {}", ended.stderr);
    }
    ensure!(!started.exists(), "it was started");
    // The cluster's own node has no agent.
    let mut other = cluster.command("host");
    let ended = run(other.args(["status", "--dir"]).arg(cluster.file("node")), PATIENCE)?;
    ensure!(ended.stderr.contains("has no agent"), "{}", ended.stderr);
    // Two agents would promise the same memory twice.
    let mut second = host.node_command("agent-host-2", "agent-node-2")?;
    let ended = run(second.stderr(Stdio::piped()), PATIENCE)?;
    ensure!(ended.stderr.contains("another agent's"), "{}", ended.stderr);
    let mut large = Command::new(&cluster.hecaton);
    large.args(["node", "--name", "agent-host-3", "--manager", &host.manager, "--dir"]);
    large.arg(cluster.file("agent-node-3")).args(["--agent", "--manage", "1G", "--buffer", "2G"]);
    let ended = run(large.arg("--qmp-dir").arg(cluster.file("vms-3")), PATIENCE)?;
    ensure!(ended.stderr.contains("a buffer of 2147483648 bytes"), "{}", ended.stderr);
    Ok(Outcome::Passed)
}
