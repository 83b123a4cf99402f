//! The host of a replay: a node with an agent that has a part of this one, and real QEMU processes
//! on it.

use crate::bench::harvest::guest::{ManagerInside, start_manager};
use crate::bench::machine::kit::Kit;
use crate::bench::machine::{Machine, Memory};
use crate::bench::world::cluster::this_program;
use crate::bench::world::process::{Guarded, eventually};
use anyhow::{Context as _, ensure};
use hecaton_node::NodePaths;
use hecaton_node::agent::{AgentReport, MachineReport};
use hecaton_node::socket::client::NodeClient;
use hecaton_vm::create::BLOCK_BYTES;
use serde_json::Value;
use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

/// How long a node, and a machine that has its memory, may take to be there.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long until a guest has all that it can have.
const GROWTH: Duration = Duration::from_secs(120);

/// Guests that are emulated are slow, and not to be evicted for it.
const RECLAIM_S: &str = "400";

pub(super) const HARVEST_VM: &str = "harvest";

/// Memory that the application leaves to the rest of the harvest VM's guest, in bytes.
const RESERVE: u64 = 384 << 20;

/// Ended in this order: machines are the caller's, before this.
pub(super) struct Host {
    client: NodeClient,
    _node: Guarded,
    _manager: Guarded,
    dir: PathBuf,
}

/// Memory that the agent divides, the part of it that stays free, and its batch, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shares {
    pub(super) managed: u64,
    pub(super) buffer: u64,
    pub(super) batch: u64,
}

impl Host {
    pub(super) fn start(shares: Shares, dir: &Path) -> anyhow::Result<Self> {
        let hecaton = this_program()?;
        let mut manager = Guarded::spawn(
            Command::new(&hecaton)
                .args(["manager", "--json", "--listen", "127.0.0.1:0"])
                .stdin(Stdio::null())
                .stdout(Stdio::piped()),
        )?;
        let ready = manager.lines()?.next()?.context("the manager does not come up")?;
        let ready: Value = serde_json::from_str(&ready)?;
        let url = ready["manager"].as_str().context("the manager does not say where it is")?;
        let own = dir.join("node");
        let bytes = |bytes: u64| bytes.to_string();
        let node = Guarded::spawn(
            Command::new(&hecaton)
                .args(["node", "--name", "bench", "--manager", url, "--agent", "--dir"])
                .arg(&own)
                .arg("--qmp-dir")
                .arg(dir.join("vms"))
                .args(["--manage", &bytes(shares.managed), "--buffer", &bytes(shares.buffer)])
                .args(["--batch", &bytes(shares.batch)])
                .args(["--reclaim-patience", RECLAIM_S, "--reclaim-time", RECLAIM_S])
                // The node would log each machine that comes and goes.
                .env("HECATON_LOG", "error")
                .stdin(Stdio::null())
                .stdout(Stdio::null()),
        )?;
        let socket = NodePaths::new(&own).control_socket();
        let client = eventually(PATIENCE, || Ok(NodeClient::connect(&socket)?))?;
        let mut host = Self { client, _node: node, _manager: manager, dir: own };
        eventually(PATIENCE, || host.report().map(drop))?;
        Ok(host)
    }

    pub(super) fn report(&mut self) -> anyhow::Result<AgentReport> {
        self.client.status()?.agent.context("the agent has not looked yet")
    }

    /// `hecaton vm create` with these arguments, ready for QEMU and its own.
    fn create(&self, name: &str, arguments: &[String]) -> anyhow::Result<Vec<OsString>> {
        let mut words = vec![this_program()?.into_os_string()];
        words.extend(["vm", "create", "--name", name, "--dir"].map(OsString::from));
        words.push(self.dir.clone().into());
        words.extend(arguments.iter().map(OsString::from));
        words.push("--".into());
        Ok(words)
    }

    /// A machine that has its memory, and runs nothing: it was never told to begin.
    pub(super) fn regular(&self, kit: &Kit, name: &str, bytes: u64) -> anyhow::Result<Guarded> {
        // QEMU complains when it is ended; a file takes that, not the terminal.
        let complaints = fs::File::create(self.dir.join(format!("{name}.complaints")))?;
        let memory = ["--regular".to_owned(), "--memory".to_owned(), bytes.to_string()];
        let words = self.create(name, &memory)?;
        let (program, arguments) = words.split_first().context("an empty command line")?;
        let mut command = Command::new(program);
        command.args(arguments).args(kit.paused());
        Guarded::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(complaints))
    }

    /// A harvest VM that runs.
    pub(super) fn harvest<'a>(
        &mut self,
        kit: &Kit,
        (min, max): (u64, u64),
        dir: &Path,
    ) -> anyhow::Result<Machine<'a>> {
        let sizes = ["--harvest", "--min", &min.to_string(), "--max", &max.to_string()];
        let launcher = self.create(HARVEST_VM, &sizes.map(str::to_owned))?;
        let kernel = "memhp_default_state=online_movable".to_owned();
        let memory = Memory::Created { launcher, kernel };
        let mut machine = Machine::start(kit, HARVEST_VM, 0, memory, dir)?;
        machine.wait_up()?;
        let inside = ManagerInside { reserve: RESERVE, ahead: max, hook: "exit 0", is_told: true };
        start_manager(&mut machine, inside)?;
        Ok(machine)
    }

    /// Waits until the harvest VM has all that it can have, or that others leave it.
    pub(super) fn settle(&mut self) -> anyhow::Result<()> {
        eventually(GROWTH, || {
            let report = self.report()?;
            let one = named(&report, HARVEST_VM).context("there is no harvest VM")?;
            ensure!(
                one.requested_bytes == one.harvested_bytes,
                "it has {} of {} bytes",
                one.harvested_bytes,
                one.requested_bytes
            );
            // The rest below this limit cannot be divided.
            let left: u64 = report.nodes.iter().map(|node| node.ledger.unassigned_bytes).sum();
            ensure!(left < 8 * BLOCK_BYTES, "{left} bytes are nobody's");
            Ok(())
        })
    }
}

pub(super) fn named<'a>(report: &'a AgentReport, name: &str) -> Option<&'a MachineReport> {
    report.machines.iter().find(|machine| machine.name == name)
}
