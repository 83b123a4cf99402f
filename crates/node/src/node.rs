//! A node: its donors, its pagers, its control socket and its heartbeats, started and stopped as
//! one. `hecaton node` is this and nothing else; `hecaton dev` puts a manager beside it.

use crate::child::{ChildCommand, adopt_orphans};
use crate::control::ControlServer;
use crate::donor_directory::DonorDirectory;
use crate::donors::{Donor, DonorSpec};
use crate::heartbeat::{HeartbeatError, Heartbeats, ManagerLink};
use crate::node_dir::{DirectoryError, NodeDir};
use crate::pagers::Pagers;
use crate::report::{DonorAddress, HeartbeatAnswer, Host, NameError, NodeReport, check_name};
use crate::vms::Vms;
use hecaton_memory::random_u64;
use hecaton_pager::Site;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Most donors of one node: one for each NUMA node of a large host, or a development cluster.
pub const MAX_DONORS: usize = 64;

/// How long a donor may take until it serves.
const DONOR_PATIENCE: Duration = Duration::from_secs(20);

/// What a node is to be.
#[derive(Debug)]
pub struct NodeConfig {
    /// Its name; one of its kind in the cluster.
    pub name: String,
    /// Where it stands (rack, zone).
    pub location: Option<String>,
    /// Copies of each page that its consumers keep unless they say otherwise.
    pub copies: u8,
    /// Its directory.
    pub dir: NodeDir,
    /// What it lends through; none, if it only borrows.
    pub donors: Vec<DonorSpec>,
    /// The manager's base URL.
    pub manager_url: String,
    /// How its children are started.
    pub command: ChildCommand,
}

/// Why a node does not start.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The node's name, or a donor's, cannot be one.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Too many donors.
    #[error("{0} donors are more than the {MAX_DONORS} that one node runs")]
    TooManyDonors(usize),
    /// A donor's port cannot be bound.
    #[error("donor `{donor}` cannot listen on {address}")]
    Listen {
        /// The donor.
        donor: String,
        /// Where it should serve.
        address: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// A donor does not serve.
    #[error("donor `{donor}` does not start: {reason}")]
    Donor {
        /// The donor.
        donor: String,
        /// What is known.
        reason: String,
    },
    /// The manager refuses the node.
    #[error(transparent)]
    Manager(HeartbeatError),
    /// The directory cannot be written.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The control socket cannot be bound.
    #[error("cannot listen on {path}")]
    ControlSocket {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The host cannot be read, or a thread not be started.
    #[error("cannot start the node")]
    Io(#[from] io::Error),
}

/// A running node. [`Node::stop`] ends it and everything that it started.
#[derive(Debug)]
pub struct Node {
    inner: Arc<Inner>,
    /// Emptied when the node stops.
    open: Mutex<Open>,
}

/// The node's ways to the outside.
#[derive(Debug, Default)]
struct Open {
    control: Option<ControlServer>,
    heartbeats: Option<Heartbeats>,
}

/// What the node's threads share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) name: String,
    location: Option<String>,
    pub(crate) boot: u64,
    dir: NodeDir,
    /// Emptied when the node stops.
    donors: Mutex<Vec<Donor>>,
    pub(crate) directory: Arc<DonorDirectory>,
    pub(crate) pagers: Pagers,
    pub(crate) vms: Vms,
}

impl Node {
    /// Starts the donors, waits until they serve, and opens the control socket. On failure nothing
    /// of it is left.
    pub fn start(config: NodeConfig) -> Result<Node, NodeError> {
        check_name(&config.name)?;
        if config.donors.len() > MAX_DONORS {
            return Err(NodeError::TooManyDonors(config.donors.len()));
        }
        for donor in &config.donors {
            check_name(&donor.name)?;
        }
        adopt_orphans()?;
        raise_descriptor_limit()?;
        let boot = random_u64();
        let mut donors = Vec::new();
        let started = start_donors(&config, &mut donors);
        let own = donors.iter().filter_map(|donor| {
            let report = donor.report();
            Some(DonorAddress {
                name: report.name,
                node: config.name.clone(),
                location: config.location.clone(),
                address: report.address?,
            })
        });
        let site = Site { host: config.name.clone(), location: config.location.clone() };
        let directory = Arc::new(DonorDirectory::new(site, own.collect()));
        let paths = config.dir.paths().clone();
        let pagers =
            Pagers::new(config.command, paths.clone(), Arc::clone(&directory), config.copies);
        let vms = Vms::new(pagers.clone());
        let inner = Arc::new(Inner {
            name: config.name,
            location: config.location,
            boot,
            dir: config.dir,
            donors: Mutex::new(donors),
            directory,
            pagers,
            vms,
        });
        let node = Node { inner, open: Mutex::default() };
        let opened = started.and_then(|()| node.open(&config.manager_url));
        match opened {
            Ok(()) => Ok(node),
            Err(error) => {
                node.stop();
                Err(error)
            }
        }
    }

    /// The node as it is now.
    pub fn report(&self) -> NodeReport {
        self.inner.report()
    }

    /// The pagers that it runs.
    pub fn pagers(&self) -> &Pagers {
        &self.inner.pagers
    }

    /// Ends the pagers and what they serve, then the donors, and removes what the node made.
    pub fn stop(&self) {
        let inner = &*self.inner;
        inner.pagers.stop();
        inner.vms.stop();
        let Open { control, heartbeats } = std::mem::take(&mut *self.lock_open());
        if let Some(heartbeats) = heartbeats {
            heartbeats.stop(inner);
        }
        if let Some(control) = control {
            control.stop();
        }
        let donors = std::mem::take(&mut *inner.lock_donors());
        for donor in &donors {
            donor.stop();
        }
        for donor in donors {
            donor.join();
        }
        // A connection's thread may hold `inner` for a moment longer, and is not waited for.
        inner.dir.clear();
    }

    /// Opens the node to the outside, once its donors serve.
    fn open(&self, manager_url: &str) -> Result<(), NodeError> {
        let link = ManagerLink::new(manager_url);
        match link.beat(&self.inner.report()) {
            Ok(answer) => self.inner.directory.update(answer.donors),
            Err(error @ HeartbeatError::Refused { .. }) => return Err(NodeError::Manager(error)),
            // It may start later than its nodes: the heartbeats go on trying.
            Err(HeartbeatError::Unreachable { .. }) => {}
        }
        self.inner.dir.write_manager_file(manager_url)?;
        let path = self.inner.dir.paths().control_socket();
        let control = ControlServer::start(&path, Arc::downgrade(&self.inner));
        let control = control.map_err(|source| NodeError::ControlSocket { path, source })?;
        self.lock_open().control = Some(control);
        let news = self.inner.pagers.news();
        let heartbeats = Heartbeats::start(link, news, Arc::downgrade(&self.inner))?;
        self.lock_open().heartbeats = Some(heartbeats);
        Ok(())
    }

    fn lock_open(&self) -> std::sync::MutexGuard<'_, Open> {
        self.open.lock().expect("no thread panics with it")
    }
}

impl Inner {
    /// Has its donors do what the manager wants of them.
    pub(crate) fn follow(&self, answer: &HeartbeatAnswer) {
        for donor in self.lock_donors().iter() {
            donor.set_draining(answer.draining.iter().any(|name| *name == donor.name()));
            donor.set_limit(answer.limits.get(donor.name()).copied());
        }
    }

    pub(crate) fn report(&self) -> NodeReport {
        NodeReport {
            name: self.name.clone(),
            boot: self.boot,
            location: self.location.clone(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            // Without /proc the report says zero, which no host has.
            host: Host::here().unwrap_or_default(),
            control_socket: self.dir.paths().control_socket(),
            donors: self.lock_donors().iter().map(Donor::report).collect(),
            consumers: self.pagers.reports(),
            vms: self.vms.reports(),
        }
    }

    fn lock_donors(&self) -> std::sync::MutexGuard<'_, Vec<Donor>> {
        self.donors.lock().expect("no thread panics with the donors")
    }
}

/// Raises this process's limit, and that of its children: a node holds some descriptors for each
/// process of each consumer, its pagers have as many themselves, and a donor has one for each
/// connection. The usual limit of 1024 is for programs that use `select`.
fn raise_descriptor_limit() -> io::Result<()> {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    Ok(setrlimit(Resource::Nofile, limit)?)
}

/// Starts all donors, then waits for all: they take their time side by side.
fn start_donors(config: &NodeConfig, donors: &mut Vec<Donor>) -> Result<(), NodeError> {
    for spec in &config.donors {
        let started = Donor::start(&config.command, spec.clone());
        donors.push(started.map_err(|source| NodeError::Listen {
            donor: spec.name.clone(),
            address: spec.listen,
            source,
        })?);
    }
    for (donor, spec) in donors.iter().zip(&config.donors) {
        donor
            .wait_serving(DONOR_PATIENCE)
            .map_err(|reason| NodeError::Donor { donor: spec.name.clone(), reason })?;
    }
    Ok(())
}
