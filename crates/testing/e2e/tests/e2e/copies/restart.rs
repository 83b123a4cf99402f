//! A cluster of `hecaton manager` and two `hecaton node`, all of whose processes are killed and
//! started again under a program. Those of `hecaton dev` end together: see `crash`.

use crate::{
    attach::Firecracker,
    harness::{
        Outcome, TestResult,
        cluster::{
            Cluster, LONG, PATIENCE, all, eventually, log_in, ready_line, scratch,
            until_heartbeats, when_unused,
        },
        fio::{end_fio, fio_verify, no_fio},
        guest::{Guests, Machine, Qemu},
        process::{Running, kill_dead, missing, run},
        wait::until,
    },
    life::program_of,
};
use anyhow::{Context as _, ensure};
use hecaton_e2e::Random;
use serde_json::Value;
use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

/// Kills in one test. The next process is killed when the one before is back.
const KILLS: usize = 14;

/// Long enough for a test, and no longer for what a failed one leaves.
const ADOPT_WITHIN: &str = "120";

/// The nodes; the program borrows through the first.
const NODES: [&str; 2] = ["a", "b"];

/// A cluster whose daemons can be started again.
struct Daemons {
    hecaton: PathBuf,
    url: String,
    scratch: tempfile::TempDir,
    manager: Running,
    nodes: Vec<Running>,
}

/// A process that a test kills.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Victim {
    Manager,
    Node(usize),
    Donor(usize),
    Pager,
    Volume,
}

const VICTIMS: [Victim; 6] = [
    Victim::Manager,
    Victim::Node(0),
    Victim::Node(1),
    Victim::Donor(0),
    Victim::Donor(1),
    Victim::Pager,
];

impl Daemons {
    fn start(hecaton: &Path) -> anyhow::Result<Self> {
        let scratch = scratch()?;
        let (manager, url) = start_manager(hecaton, "127.0.0.1:0")?;
        let mut daemons =
            Self { hecaton: hecaton.to_owned(), url, scratch, manager, nodes: Vec::new() };
        for name in NODES {
            let node = daemons.start_node(name)?;
            daemons.nodes.push(node);
        }
        daemons.eventually("both nodes serve", |status| {
            Ok(all(status, "donors").filter(|donor| donor["state"] == "serving").count() == 2)
        })?;
        until_heartbeats(|| daemons.status(), &NODES)?;
        Ok(daemons)
    }

    fn start_node(&self, name: &str) -> anyhow::Result<Running> {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.file("log"))?;
        Running::spawn(
            Command::new(&self.hecaton)
                .args(["node", "--name", name, "--lend", "256M", "--manager", &self.url])
                .args(["--adopt-within", ADOPT_WITHIN, "--park"])
                .arg(self.scratch.path())
                .arg("--dir")
                .arg(self.file(name))
                .env("HECATON_LOG", "info")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log),
        )
    }

    fn file(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn on_pool(&self, program: &str) -> Command {
        let mut command = Command::new(&self.hecaton);
        command.args(["run", "--local", "24M", "--dir"]).arg(self.file(NODES[0]));
        command.arg("--").arg(program).stdin(Stdio::null());
        command
    }

    fn status(&self) -> anyhow::Result<Value> {
        let mut command = Command::new(&self.hecaton);
        let ended = run(command.args(["status", "--json", "--manager", &self.url]), PATIENCE)?;
        ended.expect_success("hecaton status --json")?;
        serde_json::from_slice(&ended.stdout).context("the status is no JSON")
    }

    fn eventually(
        &self,
        what: &str,
        condition: impl Fn(&Value) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        eventually(|| self.status(), what, PATIENCE, condition).with_context(|| self.log())
    }

    fn log(&self) -> String {
        let log = fs::read_to_string(self.file("log")).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n    ")
    }

    /// The process in the part of the status that is about the victim.
    fn process_of(&self, victim: Victim) -> anyhow::Result<u32> {
        match victim {
            Victim::Manager => return Ok(self.manager.id()),
            Victim::Node(number) => return Ok(self.nodes[number].id()),
            Victim::Donor(_) | Victim::Pager | Victim::Volume => {}
        }
        let status = self.status()?;
        let pid = part_of(&status, victim).and_then(|part| part["pid"].as_u64());
        Ok(u32::try_from(pid.with_context(|| format!("no {victim:?}: {status}"))?)?)
    }

    /// Kills it, starts it again if nobody else does, and waits until it is back.
    fn kill(&mut self, victim: Victim) -> anyhow::Result<()> {
        let killed = self.process_of(victim)?;
        kill_dead(killed);
        match victim {
            Victim::Manager => {
                self.manager.wait(PATIENCE, || Ok(()))?;
                let address = self.url.trim_start_matches("http://").to_owned();
                (self.manager, _) = start_manager(&self.hecaton, &address)?;
            }
            Victim::Node(number) => {
                self.nodes[number].wait(PATIENCE, || Ok(()))?;
                self.nodes[number] = self.start_node(NODES[number])?;
            }
            Victim::Donor(_) | Victim::Pager | Victim::Volume => {}
        }
        self.eventually(&format!("{victim:?} is back after {killed}"), |status| {
            let is_new =
                |part: &Value| part["pid"].as_u64().is_some_and(|pid| pid != u64::from(killed));
            let serves = |part: &Value| part["state"] == "serving";
            let is_back = match victim {
                Victim::Manager => true,
                _ => part_of(status, victim).is_some_and(is_new),
            };
            // Whatever was killed, in the end everything is there.
            let donors = all(status, "donors").filter(|donor| serves(donor)).count();
            let consumers: Vec<_> = all(status, "consumers").collect();
            let is_served = match consumers.as_slice() {
                // One whose machine has come is ending, as nothing further comes.
                [paged] => paged["state"] != "starting" && paged["held_fds"].as_u64() > Some(0),
                _ => all(status, "volumes").filter(|volume| serves(volume)).count() == 1,
            };
            Ok(is_back && donors == NODES.len() && is_served)
        })
    }

    /// Ends all of it as a person would; nothing may be left.
    fn end(self) -> anyhow::Result<()> {
        let status = self.status()?;
        let donors: Vec<u64> =
            all(&status, "donors").filter_map(|one| one["pid"].as_u64()).collect();
        ensure!(donors.len() == NODES.len(), "donors are missing: {status}");
        for mut node in self.nodes {
            node.signal(rustix::process::Signal::TERM);
            let ended = node.wait(PATIENCE, || Ok(()))?;
            ensure!(ended.success(), "a node ended with {ended}");
        }
        for pid in donors {
            let is_there = crate::crash::is_running(u32::try_from(pid)?);
            ensure!(!is_there, "the donor process {pid} is left");
        }
        for name in NODES {
            ensure!(!self.scratch.path().join(name).exists(), "the directory of {name} is left");
        }
        Ok(())
    }
}

pub(crate) fn start_manager(hecaton: &Path, address: &str) -> anyhow::Result<(Running, String)> {
    let mut manager = Running::spawn(
        Command::new(hecaton)
            .args(["manager", "--json", "--listen", address])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null()),
    )?;
    let ready = ready_line(&mut manager)?;
    let url = ready["manager"].as_str().context("no URL")?.to_owned();
    Ok((manager, url))
}

fn part_of(status: &Value, victim: Victim) -> Option<&Value> {
    let node = |number: usize| {
        let mut nodes = status["nodes"].as_array().into_iter().flatten();
        nodes.find(|node| node["name"] == NODES[number])
    };
    match victim {
        Victim::Manager => None,
        Victim::Node(number) => node(number),
        Victim::Donor(number) => node(number)?["donors"].get(0),
        Victim::Pager => node(0)?["consumers"].get(0),
        Victim::Volume => node(0)?["volumes"].get(0),
    }
}

/// Node daemons, manager, donor processes and the pager are killed in a random order, each when the
/// one before is back. No byte may be wrong, and nothing may be left.
pub(crate) fn of_everything_in_any_order(cluster: &Cluster) -> TestResult {
    let mut daemons = Daemons::start(&cluster.hecaton)?;
    let mut command = daemons.on_pool(env!("CARGO_BIN_EXE_verify-threads"));
    // Until its input ends.
    command.args(["3", "6000"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut running = Running::spawn(&mut command)?;
    let mut output = running.output()?;
    program_of(&running)?;
    daemons.eventually("its memory is in the pool", |status| {
        let pages = |donor: &Value| donor["stats"]["lent_pages"].as_u64().unwrap_or(0);
        Ok(all(status, "donors").map(pages).sum::<u64>() > 0)
    })?;
    let mut random = Random(4);
    let mut order = Vec::new();
    while order.len() < KILLS {
        // All of them once, and then any.
        let at = random.below(VICTIMS.len());
        let victim = VICTIMS[at];
        if order.len() < VICTIMS.len() && order.contains(&victim) {
            continue;
        }
        order.push(victim);
        daemons.kill(victim).with_context(|| format!("after {order:?}"))?;
    }
    drop(running.child_mut().stdin.take());
    let status = running.wait(LONG, || Ok(()))?;
    let mut said = String::new();
    output.read_to_string(&mut said)?;
    ensure!(status.success(), "after {order:?} it ended with {status}\n    {}", daemons.log());
    ensure!(said.starts_with("verified"), "the program said {said:?}");
    daemons.eventually("all extents are back", |status| {
        let lent = all(status, "donors").all(|donor| donor["stats"]["lent_pages"] == 0);
        Ok(lent && all(status, "consumers").count() == 0)
    })?;
    daemons.end()?;
    Ok(Outcome::Passed)
}

/// A program that ends while there is no node has its exit status, and gives back what it had.
pub(crate) fn of_a_node_whose_program_ends_meanwhile(cluster: &Cluster) -> TestResult {
    let mut daemons = Daemons::start(&cluster.hecaton)?;
    let mut command = daemons.on_pool("sh");
    command.args(["-c", "sleep 2; exit 7"]).stdout(Stdio::null());
    let mut running = Running::spawn(&mut command)?;
    let program = program_of(&running)?;
    kill_dead(daemons.nodes[0].id());
    daemons.nodes[0].wait(PATIENCE, || Ok(()))?;
    until("the program has ended", PATIENCE, || {
        let runs = crate::crash::is_running(program);
        Ok(if runs { Err(format!("process {program} runs")) } else { Ok(()) })
    })?;
    daemons.nodes[0] = daemons.start_node(NODES[0])?;
    let status = running.wait(PATIENCE, || Ok(()))?;
    ensure!(status.code() == Some(7), "it ended with {status}");
    daemons.eventually("its pager ends", |status| Ok(all(status, "consumers").count() == 0))?;
    daemons.end()?;
    Ok(Outcome::Passed)
}

/// The next node follows the machines of the one before, and starts their pagers again.
pub(crate) fn of_a_node_under_a_machine(cluster: &Cluster) -> TestResult {
    let mut daemons = Daemons::start(&cluster.hecaton)?;
    let (image, socket) = (daemons.file("snapshot"), daemons.file("firecracker.sock"));
    let mut random = Random(12);
    let bytes: Vec<u8> = (0..32 << 20).map(|_| random.below(256) as u8).collect();
    fs::write(&image, bytes)?;
    let mut command = Command::new(&daemons.hecaton);
    command.args(["vm", "attach", "micro", "--local", "64M", "--json"]);
    command.arg("--firecracker").arg(&socket).arg("--image").arg(&image);
    command.arg("--dir").arg(daemons.file(NODES[0])).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut attachment = Running::spawn(&mut command)?;
    ready_line(&mut attachment)?;
    let mut client = Firecracker::start(socket.to_str().context("a path")?, &image)?;
    ensure!(client.is_done()?, "the client hands nothing over");
    client.round()?;
    for victim in [Victim::Node(0), Victim::Pager, Victim::Node(0)] {
        daemons.kill(victim)?;
        client.round()?;
    }
    daemons.eventually("the machine is followed", |status| {
        let vms: Vec<_> = all(status, "vms").collect();
        Ok(vms.len() == 1 && vms[0]["name"] == "micro" && vms[0]["state"] == "running")
    })?;
    client.end()?;
    let ended = attachment.wait(PATIENCE, || Ok(()))?;
    ensure!(ended.success(), "`hecaton vm attach` ended with {ended}");
    daemons.eventually("nothing borrows", |status| Ok(all(status, "consumers").count() == 0))?;
    daemons.end()?;
    Ok(Outcome::Passed)
}

/// The same with QEMU: its guest verifies its memory while node and pager are killed, and its
/// machine is shown and ends as if it had always been this node's.
pub(crate) fn of_a_node_under_qemu(cluster: &Cluster, guests: &Guests) -> TestResult {
    let mut daemons = Daemons::start(&cluster.hecaton)?;
    // The guest works until it is told to stop. The port is open before anything is written to it.
    let script = "exec </dev/ttyS0
        stress-ng --vm 1 --vm-bytes 120M --verify --vm-method all -t 0 &
        read -r word; kill -INT $!; wait $!";
    let mut command = Command::new(&daemons.hecaton);
    command.args(["vm", "run", "--name", "guest", "--memory", "256M", "--local", "64M", "--dir"]);
    command.arg(daemons.file(NODES[0])).arg("--");
    command.args(guests.command_line(Qemu::Backports, script)).arg("-no-reboot");
    let monitor = daemons.file("monitor");
    command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", monitor.display()));
    let mut machine = Machine::spawn("guest", command, monitor)?;
    machine.wait_for("dispatching hogs")?;
    for victim in [Victim::Node(0), Victim::Pager, Victim::Node(0)] {
        daemons.kill(victim)?;
        daemons.eventually("the machine is followed", |status| {
            let vms: Vec<_> = all(status, "vms").collect();
            Ok(vms.len() == 1 && vms[0]["name"] == "guest" && vms[0]["state"] == "running")
        })?;
    }
    machine.say("stop")?;
    machine.succeed()?;
    daemons.eventually("nothing borrows", |status| Ok(all(status, "consumers").count() == 0))?;
    daemons.end()?;
    Ok(Outcome::Passed)
}

/// The next node takes over the volumes of the one before, with their sockets and tables: clients
/// notice nothing, and when a volume's process is killed then, another goes on.
pub(crate) fn of_a_node_under_a_volume(cluster: &Cluster) -> TestResult {
    if let Some(reason) = no_fio()?.or_else(|| missing("qemu-io")) {
        return Ok(Outcome::Skipped(reason));
    }
    let mut daemons = Daemons::start(&cluster.hecaton)?;
    let (dir, socket) = (daemons.file(NODES[0]), daemons.file("disk.nbd"));
    let volume = |arguments: &[&str]| {
        let mut command = Command::new(&cluster.hecaton);
        run(command.arg("volume").args(arguments).arg("--dir").arg(&dir), PATIENCE)
    };
    volume(&["create", "disk", "--size", "112M"])?.expect_success("hecaton volume create")?;
    let address = format!("unix:{}", socket.display());
    volume(&["export", "disk", "--nbd", &address])?.expect_success("hecaton volume export")?;
    volume(&["resize", "disk", "--size", "128M"])?.expect_success("hecaton volume resize")?;
    let uri = format!("nbd+unix:///disk?socket={}", socket.display());
    let io = |step: &str| -> anyhow::Result<()> {
        let mut io = Command::new("qemu-io");
        let ended = run(io.args(["-f", "raw", "-c", step]).arg(&uri), PATIENCE)?;
        ended.expect_success(step)?;
        ensure!(!ended.text().contains("failed"), "{step}: {}", ended.text());
        Ok(())
    };
    io("write -P 7 104M 4M")?;
    let mut fio = fio_verify(&uri, log_in(&daemons.scratch)?);
    let mut fio = Running::spawn(&mut fio)?;
    daemons.eventually("fio writes", |status| {
        let part = part_of(status, Victim::Volume).context("no volume")?;
        Ok(part["stats"]["written_bytes"].as_u64() > Some(4 << 20))
    })?;
    for (turn, victim) in
        [Victim::Node(0), Victim::Donor(0), Victim::Node(0)].into_iter().enumerate()
    {
        if turn > 0 {
            thread::sleep(Duration::from_millis(500));
        }
        daemons.kill(victim)?;
    }
    daemons.eventually("its client is told of", |status| {
        let part = part_of(status, Victim::Volume).context("no volume")?;
        Ok(part["stats"]["clients"].as_u64() > Some(0) && part["exports"][0]["address"] == address)
    })?;
    end_fio(&mut fio).with_context(|| daemons.log())?;
    daemons.kill(Victim::Volume)?;
    io("read -P 7 104M 4M")?;
    daemons.kill(Victim::Node(0))?;
    daemons.eventually("what it was is told", |status| {
        let part = part_of(status, Victim::Volume).context("no volume")?;
        let stats = &part["stats"];
        Ok(part["restarts"] == 1 && part["size_bytes"] == 128 << 20 && stats["errors"] == 0)
    })?;
    io("read -P 7 104M 4M")?;
    when_unused(PATIENCE, || volume(&["delete", "disk"]))?;
    ensure!(!socket.exists(), "the socket of a deleted volume is left");
    daemons.end()?;
    Ok(Outcome::Passed)
}
