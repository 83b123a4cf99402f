//! A node: its donors, its pagers, its control socket and its heartbeats, started and stopped as
//! one. `hecaton node` is this and nothing else; `hecaton dev` puts a manager beside it.

use crate::adopt::{AdoptError, Adopted, adopt};
use crate::child::{ChildCommand, adopt_orphans};
use crate::control::ControlServer;
use crate::donor_directory::DonorDirectory;
use crate::donors::{Donor, DonorSpec, DonorStart, OrphanError};
use crate::heartbeat::{HeartbeatError, Heartbeats, ManagerLink};
use crate::node_dir::{DirectoryError, NodeDir};
use crate::pagers::Pagers;
use crate::report::{DonorAddress, HeartbeatAnswer, Host, NameError, NodeReport, check_name};
use crate::vms::Vms;
use hecaton_pager::Site;
use hecaton_pager::adoption::Outlive;
use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
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
    /// How long its children outlive it when it is killed, for another node to adopt them; they do
    /// not if nothing is said, and then it adopts none either.
    pub adopt_within: Option<Duration>,
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
    /// A donor of the node before this one is there, and not as it should be.
    #[error("donor `{donor}` is not taken over")]
    Orphan {
        /// The donor.
        donor: String,
        /// Why.
        source: OrphanError,
    },
    /// Something of the node before this one is there and cannot be taken over.
    #[error(transparent)]
    Adopt(#[from] AdoptError),
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
    /// Adopts the donors that the node before this one has left, starts the others, waits until they
    /// serve, and opens the control socket. On failure nothing of it is left but what was adopted,
    /// which is left as it was.
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
        let boot = config.dir.boot(&config.name)?;
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
        let pagers = Pagers::new(
            config.command,
            paths,
            Arc::clone(&directory),
            config.copies,
            config.adopt_within,
        );
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
                // What others have at donors that were adopted is not this node's to give up.
                node.inner.lock_donors().iter().for_each(Donor::leave_if_adopted);
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
        let listener = UnixListener::bind(&path);
        let listener = listener.map_err(|source| NodeError::ControlSocket { path, source })?;
        // With the socket bound, whose launchers wait there, and before any of them is answered.
        for machine in self.inner.pagers.adopt_left(&self.inner.dir) {
            self.inner.vms.adopt(machine);
        }
        let control = ControlServer::start(listener, Arc::downgrade(&self.inner))?;
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

/// Adopts donors that are there and starts the others, then waits for all: they take their time side
/// by side.
fn start_donors(config: &NodeConfig, donors: &mut Vec<Donor>) -> Result<(), NodeError> {
    let mut left = match config.adopt_within {
        Some(patience) => left_donors(&config.dir, patience)?,
        None => Vec::new(),
    };
    let mut numbers = 1..;
    for spec in &config.donors {
        let name = &spec.name;
        if let Some(at) = left.iter().position(|(_, orphan)| orphan.word.name == *name) {
            let (outlive, orphan) = left.swap_remove(at);
            let pid = orphan.child.process.pid();
            let adopted = Donor::adopt(&config.command, spec.clone(), outlive, orphan);
            donors
                .push(adopted.map_err(|source| NodeError::Orphan { donor: name.clone(), source })?);
            tracing::info!(donor = name, pid, "took over the donor of the node before");
            continue;
        }
        let outlive = config.adopt_within.map(|patience| {
            let paths = config.dir.paths();
            let free = numbers.by_ref().map(|number| paths.donor_socket(number));
            let socket = free.into_iter().find(|socket| !socket.exists());
            Outlive { socket: socket.expect("numbers do not end"), patience }
        });
        let started = Donor::start(&config.command, spec.clone(), outlive);
        donors.push(started.map_err(|source| NodeError::Listen {
            donor: spec.name.clone(),
            address: spec.listen,
            source,
        })?);
    }
    for (_, orphan) in left {
        tracing::warn!(
            donor = orphan.word.name,
            pid = orphan.child.process.pid(),
            "a donor of the node before is none of this one's: it is left alone, and ends by itself"
        );
    }
    for (donor, spec) in donors.iter().zip(&config.donors) {
        donor
            .wait_serving(DONOR_PATIENCE)
            .map_err(|reason| NodeError::Donor { donor: spec.name.clone(), reason })?;
    }
    Ok(())
}

/// The donors that the node before this one has left, each with the way in which it outlives this one.
fn left_donors(
    dir: &NodeDir,
    patience: Duration,
) -> Result<Vec<(Outlive, Adopted<DonorStart>)>, AdoptError> {
    let mut left = Vec::new();
    for socket in dir.donor_sockets().into_iter().take(MAX_DONORS) {
        if let Some(orphan) = adopt(&socket, patience)? {
            left.push((Outlive { socket, patience }, orphan));
        }
    }
    Ok(left)
}
