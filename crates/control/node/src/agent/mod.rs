//! Host agent: divides this host's memory and cores among machines and donors.
//!
//! The agent finds the machines of its directory at its start. Every second it describes the host
//! to the broker (`hecaton-broker`) and executes the broker's actions: it resizes machines, admits
//! waiting ones and limits donors. Its only durable state is one file for each machine, written
//! before the machine exists. So the next agent can continue after a kill at any point.
//!
//! A container takes part as a machine does: the agent moves the limit of its memory cgroup.
//!
//! libvirt's domains on this host take part if the configuration names a libvirt connection. One
//! thread lists them with `virsh`, and one thread for each harvest VM among them resizes it.
//!
//! One thread looks and decides. Each machine has a thread for its monitor, and a harvest VM has a
//! second one for the manager inside it. So a silent machine stalls no other.
//! The agent reads resident memory from `/proc` and cgroups, and never asks a guest for it.

mod cores;
mod cpu_groups;
mod divide;
mod host_memory;
mod keeper;
mod lending;
mod links;
mod machines;
mod places;
mod report;

pub use report::{
    AgentReport, CoreReport, GaveWayReport, HarvestGrant, HarvestShare, HarvestWord, LibvirtReport,
    MachinePartReport, MachineReport, MachineState, NewcomerReport, NodeMemoryReport,
};

use crate::agent::machines::process::ProcessId;
use crate::agent::machines::record::{Directory, RecordError};
use crate::donors::DonorSpec;
use crate::node::Inner;
use crate::socket::message::{Admitted, CreateVm};
use crate::stop::{Bell, Stop};
use hecaton_broker::{Settings, SettingsError};
use hecaton_memory::Size;
use keeper::Keeper;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// How an agent is to be.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// The directory of the machines' monitors, and of the files that say what they are.
    pub qmp_dir: PathBuf,
    /// The most that it gives to machines and donors, in bytes; none for all that the host has.
    pub manage_bytes: Option<u64>,
    /// The most cores that it gives to machines; none for as many as the node may run on.
    pub manage_cores: Option<u32>,
    /// libvirt's connection, as virsh knows it, whose domains take part.
    pub libvirt: Option<String>,
    /// How long the first batch waits for a guest that has been told of the size that it will have.
    /// None if guests are not told of sizes.
    pub guest_patience: Option<Duration>,
    /// Settings of the broker. The agent itself limits the donors, by their reports.
    pub settings: Settings,
}

/// Why there is no agent.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The directory cannot be used.
    #[error(transparent)]
    Directory(#[from] RecordError),
    /// Settings that cannot be.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// More than there is.
    #[error("--manage {} is more than the {} that the host has; give less", Size(*.manage), Size(*.host))]
    Manage {
        /// Bytes that `--manage` names.
        manage: u64,
        /// Bytes that the host has.
        host: u64,
    },
    /// The same of cores, or none at all.
    #[error("--manage-cores {manage} cannot be: give 1 to {host}, which this host has")]
    ManageCores {
        /// Cores that `--manage-cores` names.
        manage: u32,
        /// Cores that the host has.
        host: u32,
    },
    /// It could not be limited with the node that it is on.
    #[error(
        "donor `{0}` is to lend memory of all NUMA nodes of a host that an agent divides node by node; have it lend \
         one node's (--numa NODE), or start one for each"
    )]
    LendsOfAllNodes(String),
    /// The host cannot be read, or the thread not be started.
    #[error("the agent cannot start")]
    Io(#[from] io::Error),
}

/// Why a machine is not created.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// There is no agent.
    #[error("the node has no agent; start it with --agent --qmp-dir DIR")]
    NoAgent,
    /// The agent has refused it.
    #[error("{0}")]
    Refused(String),
    /// The node stops.
    #[error("the node ends, and admits nobody")]
    Ending,
}

/// One who waits for an answer.
#[derive(Debug)]
pub(crate) struct Arrival {
    wish: CreateVm,
    /// Its launcher, which becomes the machine.
    process: ProcessId,
    answer: Sender<Result<Admitted, String>>,
}

/// State that the agent's thread shares with its callers.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// None once nobody is admitted any more.
    arrivals: Mutex<Option<Vec<Arrival>>>,
    report: Mutex<Option<AgentReport>>,
    harvest_word: Mutex<HarvestWord>,
    stop: Stop,
    bell: Bell,
}

impl Shared {
    fn arrivals(&self) -> MutexGuard<'_, Option<Vec<Arrival>>> {
        self.arrivals.lock().expect("no thread panics with the arrivals")
    }

    fn report(&self) -> MutexGuard<'_, Option<AgentReport>> {
        self.report.lock().expect("no thread panics with the report")
    }

    fn harvest_word(&self) -> MutexGuard<'_, HarvestWord> {
        self.harvest_word.lock().expect("no thread panics with the word")
    }
}

/// The node's agent, if it has one.
#[derive(Debug)]
pub(crate) struct Agent {
    shared: Arc<Shared>,
    /// Until it is opened.
    keeper: Mutex<Option<Box<Keeper>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Agent {
    /// Takes the directory; nothing is looked at yet. `donors`: those of its node. `has_manager`:
    /// whether somebody will say if there is a quota of harvest VMs.
    pub(crate) fn new(
        config: AgentConfig,
        donors: &[DonorSpec],
        has_manager: bool,
    ) -> Result<Agent, AgentError> {
        let shared = Arc::new(Shared::default());
        if has_manager {
            *shared.harvest_word() = HarvestWord::Nothing;
        }
        let directory = Directory::claim(&config.qmp_dir)?;
        let keeper = Keeper::new(&config, directory, donors, Arc::clone(&shared))?;
        *shared.arrivals() = Some(Vec::new());
        let keeper = Mutex::new(Some(Box::new(keeper)));
        Ok(Agent { shared, keeper, thread: Mutex::default() })
    }

    /// Begins: donors are limited by it from now on.
    pub(crate) fn open(&self, node: Weak<Inner>) -> io::Result<()> {
        let keeper = self.keeper.lock().expect("no thread panics with the keeper").take();
        let Some(keeper) = keeper else { return Ok(()) };
        let thread =
            thread::Builder::new().name("agent".into()).spawn(move || keeper.run(&node))?;
        *self.thread.lock().expect("no thread panics with the thread") = Some(thread);
        Ok(())
    }

    /// Waits until the machine is admitted, or refused; also without end, as long as `pid` lives,
    /// its launcher.
    pub(crate) fn create(&self, mut wish: CreateVm, pid: u32) -> Result<Admitted, CreateError> {
        if wish.domain.is_some() {
            wish.name = machines::domain_plan::machine_name(&wish.name);
        }
        let process = ProcessId::of(pid).ok_or(CreateError::Refused(format!(
            "process {pid}, which is to become the machine, cannot be seen from the node: start both in the same \
             process namespace"
        )))?;
        let (answer, answered) = mpsc::channel();
        match &mut *self.shared.arrivals() {
            Some(arrivals) => arrivals.push(Arrival { wish, process, answer }),
            None => return Err(CreateError::Ending),
        }
        self.shared.bell.ring();
        match answered.recv() {
            Ok(answer) => answer.map_err(CreateError::Refused),
            Err(mpsc::RecvError) => Err(CreateError::Ending),
        }
    }

    /// Goes by what the manager grants from now on; none: there is no quota.
    pub(crate) fn follow(&self, grant: Option<HarvestGrant>) {
        let word = grant.map_or(HarvestWord::Unlimited, HarvestWord::Grant);
        if std::mem::replace(&mut *self.shared.harvest_word(), word) != word {
            self.shared.bell.ring();
        }
    }

    /// The host as it was found the last time; none before the first look.
    pub(crate) fn report(&self) -> Option<AgentReport> {
        self.shared.report().clone()
    }

    /// Ends. Machines run on, as large as they are.
    pub(crate) fn stop(&self) {
        self.shared.stop.set();
        self.shared.bell.ring();
        drop(self.shared.arrivals().take());
        if let Some(thread) = self.thread.lock().expect("no thread panics with the thread").take() {
            // One that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}
