//! Runs one process for each volume from its creation to its deletion.
//!
//! A volume's data exists nowhere else. So the node restarts a process that dies, as it does for
//! donors ([`crate::donors`]), and passes it the tables that its predecessor sent. The node owns
//! the sockets for clients: while it replaces a process, clients wait in the sockets' queues.
//!
//! Node and process talk over the socket that is the process's standard input: [`VolumeStart`] goes
//! down, then [`VolumeOrder`]s; [`VolumeEvent`]s come up. When a node is killed, the process serves
//! on, and waits for another node, which adopts it as it is ([`crate::children::adopt`]).

mod export;
mod hand_over;
mod orphans;
mod sharing;
mod supervisor;
mod tables;
#[cfg(test)]
pub(crate) mod tests;
mod unexport;

pub use export::{AddressError, ExportAddress, ExportError, Exported};

use crate::children::child::{ChildCommand, Target};
use crate::children::held::HeldFds;
use crate::cluster::donor_directory::DonorDirectory;
use crate::cluster::report::{DonorAddress, NameError, check_name};
use crate::division::Word;
use crate::node_dir::NodePaths;
use crate::socket::message::{CreateVolume, Export, ResizeVolume, SnapshotVolume, Unexport};
use crate::stop::{Bell, Stop};
use export::Entrance;
use hecaton_block::hand_over::Offer;
use hecaton_block::readers::SharedBy;
use hecaton_block::ublk::{self, Owner};
use hecaton_block::{Stats, VolumeConfig, holders};
use hecaton_memory::{PAGE_SIZE, Size, pages_for_bytes, random_u64};
use hecaton_pager::adoption::Outlive;
use hecaton_pager::placement::PlacementError;
use hecaton_pager::{COPYING_BYTES_PER_S, FAILOVER, Placement, SCRUB_BYTES_PER_S};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

/// Most volumes of one node.
pub const MAX_VOLUMES: usize = 64;

/// Most addresses at which one volume is exported.
pub const MAX_EXPORTS: usize = 16;

/// How long a new volume's process may take until it serves.
const START_PATIENCE: Duration = Duration::from_secs(20);

/// How long a process that was told to end may take before it is killed. A donor that is away is
/// waited for.
const STOP_GRACE: Duration = Duration::from_secs(15);

/// For how long donors keep a silent volume, and requests wait for a donor if nothing else is said.
const LEASE: Duration = Duration::from_secs(60);

/// The label of the volume's tables among the descriptors that go down with [`VolumeStart`].
pub const STATE: &str = "state";

/// The label of its spill file there.
pub const SPILL: &str = "spill";

/// The first line to a volume's process, and what it says of itself to a node that adopts it. A
/// descriptor for each export follows, then those that its labels name.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VolumeStart {
    /// The volume's configuration.
    pub config: VolumeConfig,
    /// The donors of the cluster, as far as they are known.
    pub donors: Vec<DonorAddress>,
    /// Where it is exported; a socket or a mount for each.
    pub exports: Vec<Exported>,
    /// Labels of the descriptors that its predecessor sent: [`STATE`] and [`SPILL`], or none.
    pub labels: Vec<String>,
    /// How often a process of the volume was started again.
    pub restarts: u64,
    /// How it outlives its node, if it does.
    pub outlive: Option<Outlive>,
    /// Which node is to have it, if one is.
    #[serde(default)]
    pub detached: Option<Offer>,
}

/// A further line to a volume's process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeOrder {
    /// Serve it here, too: the socket, or the mount, comes along.
    Export(Exported),
    /// Serve it here no more; while clients are connected only if it is forced. Answered with
    /// [`VolumeEvent::Unexported`] or [`VolumeEvent::NotUnexported`].
    Unexport {
        /// Where.
        address: ExportAddress,
        /// Clients are cut off.
        force: bool,
    },
    /// The donors of the cluster are these.
    Donors(Vec<DonorAddress>),
    /// Have so many bytes from now on. Answered with [`VolumeEvent::Resized`] or
    /// [`VolumeEvent::NotResized`].
    Resize(u64),
    /// Target of the cluster's policy. Before this order the volume uses as much as it gets.
    Target {
        /// Bytes that it may hold, each page counted once; nothing limits it if there are none.
        bytes: Option<u64>,
        /// Bytes beyond the target that must go to its spill file; only idle ones go.
        take_back_bytes: u64,
    },
    /// Copy the volume as it is; the copy is to be this. Answered with [`VolumeEvent::Snapshot`] or
    /// [`VolumeEvent::NoSnapshot`].
    Snapshot(Box<VolumeConfig>),
    /// Offer it to a node. Answered with [`VolumeEvent::Detached`] or [`VolumeEvent::NotDetached`].
    Detach(Offer),
    /// Withdraw the offer. Answered with [`VolumeEvent::Kept`] or [`VolumeEvent::NotKept`].
    Keep,
    /// Give everything back and end, unless a client is connected.
    Delete,
    /// Give everything back and end.
    End,
}

/// A line from a volume's process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeEvent {
    /// Keep the descriptors that come along, under these labels.
    HoldFds(Vec<String>),
    /// It serves its exports.
    Serving,
    /// Its statistics at this moment.
    Stats(Box<Stats>),
    /// The requests of this file do not come through io_uring, though that was wanted.
    WithoutUring(ExportAddress),
    /// It serves no more what it was ordered not to.
    Unexported,
    /// It serves it on, and why.
    NotUnexported(String),
    /// It has the size that was ordered.
    Resized,
    /// It keeps its size, and why.
    NotResized(String),
    /// The ordered copy is complete. Its tables come along, for the process that will serve it.
    Snapshot,
    /// There is no copy, and why.
    NoSnapshot(String),
    /// Another node can have it there.
    Detached(Offer),
    /// It cannot, and why.
    NotDetached(String),
    /// No other node can have it any more.
    Kept,
    /// One may have it already, and what is known of that.
    NotKept(String),
    /// Another node has it, and serves it: the process is to end, and what it had is that one's.
    Taken,
    /// It is not deleted: so many clients are connected.
    InUse(usize),
    /// It has given everything back, as it was ordered to; the process ends.
    Released,
    /// It cannot go on; the process ends.
    Failed(String),
}

/// State of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeState {
    /// Its process is being started, or started again.
    #[default]
    Starting,
    /// It is served.
    Serving,
    /// It gives its memory back.
    Ending,
}

/// A volume, as the node reports it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct VolumeReport {
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: VolumeState,
    /// Its size.
    pub size_bytes: u64,
    /// Copies of each page.
    pub copies: u8,
    /// The file for what the pool has no room for.
    #[serde(default)]
    pub spill: Option<PathBuf>,
    /// Most bytes of the pool that all copies together take.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// Donors, and that file, get pages only encrypted.
    #[serde(default)]
    pub encrypted: bool,
    /// The volume that it is a copy of, as of one moment; nobody may write to it.
    #[serde(default)]
    pub snapshot_of: Option<String>,
    /// Which node can have it, if it is detached, and where it gets it.
    #[serde(default)]
    pub detached: Option<Offer>,
    /// Which node has it, if it is only read here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads_from: Option<SharedBy>,
    /// Where clients reach it.
    pub exports: Vec<Exported>,
    /// Its process, while there is one.
    pub pid: Option<u32>,
    /// How often that was started again.
    pub restarts: u64,
    /// Why the process before this one ended, if there was one.
    pub last_error: Option<String>,
    /// Its last statistics; `None` before the first.
    pub stats: Option<Stats>,
}

/// Why a volume is not created, exported, resized or deleted.
#[derive(Debug, thiserror::Error)]
pub enum VolumesError {
    /// The name cannot be one.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The name is in use.
    #[error("the node has a volume `{0}` already; choose another name, or delete that one")]
    NameTaken(String),
    /// There are [`MAX_VOLUMES`].
    #[error("the node has {MAX_VOLUMES} volumes, and takes no more; delete one")]
    TooMany,
    /// The size is not of whole pages.
    #[error("{} is no size for a volume: it must be a multiple of {PAGE_SIZE} bytes", Size(*.0))]
    Size(u64),
    /// The copies cannot be.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The node is about to end.
    #[error("the node is stopping; try again when it is back")]
    Stopping,
    /// No such volume.
    #[error("the node has no volume `{0}`; `hecaton volume list` names those it has")]
    Unknown(String),
    /// The process could not be started, or said why it does not serve.
    #[error("the volume `{volume}` cannot be served: {reason}")]
    Start {
        /// The volume.
        volume: String,
        /// The process's reason, how it ended, or that it timed out.
        reason: String,
    },
    /// Clients are connected.
    #[error("the volume `{volume}` is in use by {clients} client(s): disconnect them first")]
    InUse {
        /// The volume.
        volume: String,
        /// How many.
        clients: usize,
    },
    /// Its file is open.
    #[error(
        "the volume `{volume}` is in use: {} is open, mounted, or a loop device's, used by {holders}",
        .path.display()
    )]
    FileInUse {
        /// The volume.
        volume: String,
        /// The file.
        path: PathBuf,
        /// By whom, in words.
        holders: String,
    },
    /// It is not served there.
    #[error("the volume `{volume}` is not exported at {address}{}", elsewhere(.others))]
    NotExported {
        /// The volume.
        volume: String,
        /// Where it was thought to be.
        address: ExportAddress,
        /// Where it is.
        others: Vec<ExportAddress>,
    },
    /// It is served on.
    #[error("the volume `{volume}` is exported at {address} as before: {reason}")]
    NotUnexported {
        /// The volume.
        volume: String,
        /// Where.
        address: ExportAddress,
        /// Why.
        reason: String,
    },
    /// It keeps its size.
    #[error("the volume `{volume}` keeps its size: {reason}")]
    NotResized {
        /// The volume.
        volume: String,
        /// Why.
        reason: String,
    },
    /// There is no copy of it.
    #[error("there is no snapshot of the volume `{volume}`: {reason}")]
    NoSnapshot {
        /// The volume.
        volume: String,
        /// Why.
        reason: String,
    },
    /// It is a copy.
    #[error("the volume `{0}` is a snapshot, which stays as it is")]
    IsSnapshot(String),
    /// It is detached.
    #[error(
        "the volume `{volume}` is detached for node `{to}`: attach it there, or, as long as that node has not been given \
         it, here again"
    )]
    IsDetached {
        /// The volume.
        volume: String,
        /// The node.
        to: String,
    },
    /// It is not known yet whether another node is to have it.
    #[error(
        "the volume `{0}` is being detached; `hecaton volume status {0}` tells what comes of it"
    )]
    IsBeingDetached(String),
    /// It stays where it is.
    #[error("the volume `{volume}` is not detached: {reason}")]
    NotDetached {
        /// The volume.
        volume: String,
        /// Why.
        reason: String,
    },
    /// It is another node's.
    #[error(
        "the volume `{volume}` is read here, and is node `{node}`'s; `hecaton volume detach {volume}` ends that"
    )]
    IsAnothers {
        /// The volume.
        volume: String,
        /// The node.
        node: String,
    },
    /// Other nodes do not read it.
    #[error("the volume `{volume}` is not shared with other nodes: {reason}")]
    NotShared {
        /// The volume.
        volume: String,
        /// Why.
        reason: String,
    },
    /// It does not come here.
    #[error("the volume `{volume}` is not attached: {reason}")]
    NotAttached {
        /// The volume.
        volume: String,
        /// Why.
        reason: String,
    },
    /// It is here already.
    #[error("the volume `{0}` is attached to this node already, or another one of that name")]
    IsAttached(String),
    /// It does not end.
    #[error("the volume `{0}` is still giving its memory back: a donor may be away")]
    StillEnding(String),
    /// There would be a file, and something else.
    #[error(
        "the volume `{volume}` is exported at {other}: a file, or block device, is attached for as long as it is \
         there, and a volume has one writer, or readers. Have all of its exports --read-only; a volume whose clients \
         take care of each other is created with --multi-writer"
    )]
    FileBeside {
        /// The volume.
        volume: String,
        /// The export that is there.
        other: ExportAddress,
    },
    /// There would be two block devices.
    #[error(
        "the volume `{volume}` is a block device already, {other}; `hecaton volume status` shows where"
    )]
    IsDisk {
        /// The volume.
        volume: String,
        /// The export that is there.
        other: ExportAddress,
    },
    /// It is exported at [`MAX_EXPORTS`] addresses.
    #[error("the volume `{0}` is exported at {MAX_EXPORTS} addresses, and at no more")]
    TooManyExports(String),
    /// The address cannot be listened on, the file not mounted.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// The kernel refuses.
    #[error(transparent)]
    Io(#[from] io::Error),
}

fn elsewhere(others: &[ExportAddress]) -> String {
    let others: Vec<_> = others.iter().map(ExportAddress::to_string).collect();
    if others.is_empty() {
        "; it is exported nowhere".to_owned()
    } else {
        format!("; it is at {}", others.join(", "))
    }
}

/// All volumes of a node.
#[derive(Clone, Debug)]
pub struct Volumes(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    command: ChildCommand,
    donors: Arc<DonorDirectory>,
    /// Copies of each page where nothing is said of them.
    copies: u8,
    paths: NodePaths,
    /// How long processes outlive the node, for another to adopt them.
    adopt_within: Option<Duration>,
    table: Mutex<BTreeMap<String, Volume>>,
    /// Notified when an entry of the table changes or goes.
    changed: Condvar,
    stop: Stop,
    /// Rung when a volume comes or goes.
    news: Arc<Bell>,
}

#[derive(Debug)]
struct Volume {
    config: VolumeConfig,
    /// No other volume of the node has it, nor one that waits in its directory for another node.
    number: u64,
    report: VolumeReport,
    entrances: Vec<Entrance>,
    held: HeldFds,
    process: Option<Process>,
    has_served: bool,
    /// The donors that its process was told of last.
    told: Vec<DonorAddress>,
    /// The policy's latest message to its process, until it is sent.
    word: Option<Word>,
    /// The last such message that its process got.
    told_word: Option<Word>,
    /// It is to be deleted: what came of it so far.
    deletion: Deletion,
    /// It is to have another size: what came of it so far.
    resizing: Resizing,
    /// It is to be copied: what came of it so far.
    copying: Copying,
    /// It is to be served at an address no more: what came of it so far.
    unexporting: Unexporting,
    /// Another node is to have it, or is not: what came of it so far.
    handing: Handing,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Handing {
    No,
    Asked,
    Done,
    Refused(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Unexporting {
    No,
    Asked(ExportAddress),
    Done,
    Refused(String),
}

#[derive(Debug)]
enum Copying {
    No,
    Asked,
    /// With the copy's tables.
    Done(OwnedFd),
    Refused(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Resizing {
    No,
    Asked(u64),
    Done,
    Refused(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deletion {
    No,
    Asked,
    Refused(usize),
}

/// Means to stop a volume's process: first an order, then a signal.
#[derive(Debug)]
struct Process {
    stream: UnixStream,
    target: Target,
}

impl Volumes {
    /// None yet.
    pub fn new(
        command: ChildCommand,
        donors: Arc<DonorDirectory>,
        copies: u8,
        paths: NodePaths,
        adopt_within: Option<Duration>,
        news: Arc<Bell>,
    ) -> Volumes {
        Volumes(Arc::new(Shared {
            command,
            donors,
            copies,
            paths,
            adopt_within,
            table: Mutex::default(),
            changed: Condvar::new(),
            stop: Stop::default(),
            news,
        }))
    }

    /// Creates a volume, and waits until it is served.
    pub fn create(&self, wish: CreateVolume) -> Result<(), VolumesError> {
        check_name(&wish.name)?;
        check_size(wish.size_bytes)?;
        let name = wish.name.clone();
        self.reserve(wish)?;
        self.start(name)
    }

    /// Starts the process of a volume that has none yet, and waits until it serves.
    fn start(&self, name: String) -> Result<(), VolumesError> {
        let supervisor = {
            let (volumes, name) = (self.clone(), name.clone());
            move || volumes.supervise(&name, None)
        };
        if let Err(error) =
            thread::Builder::new().name("volume-supervisor".into()).spawn(supervisor)
        {
            self.forget(&name);
            return Err(error.into());
        }
        let is_undecided = |table: &mut BTreeMap<String, Volume>| {
            table
                .get(&name)
                .is_some_and(|volume| !volume.has_served && volume.report.last_error.is_none())
        };
        let (mut table, _) = self
            .0
            .changed
            .wait_timeout_while(self.table(), START_PATIENCE, is_undecided)
            .expect("no thread panics with the table");
        let fail = |reason| Err(VolumesError::Start { volume: name.clone(), reason });
        match table.get_mut(&name) {
            Some(volume) if volume.has_served => Ok(()),
            Some(volume) => {
                let late = || format!("it is not served after {} s", START_PATIENCE.as_secs());
                let reason = volume.report.last_error.clone().unwrap_or_else(late);
                // The supervisor does not start another, for this one never served.
                volume.signal(Signal::KILL);
                table.remove(&name);
                drop(table);
                self.0.news.ring();
                fail(reason)
            }
            None => fail("the node is stopping".to_owned()),
        }
    }

    /// Has a volume served at one more address. Returns it, with the port that was taken.
    pub fn export(&self, wish: Export) -> Result<ExportAddress, VolumesError> {
        let mut exported = Exported {
            address: wish.address,
            read_only: wish.read_only,
            tls: wish.tls,
            uring: wish.uring,
        };
        if let ExportAddress::Nodes(wanted) = exported.address {
            // Those who come there read.
            exported.read_only = true;
            let at = self.for_nodes(&wish.volume, wanted, wish.insecure)?;
            exported.address = ExportAddress::Nodes(Some(at));
        }
        // Checks the export itself and beside this volume's others, before anything is bound.
        exported.check()?;
        let bytes = self.with(&wish.volume, |volume| {
            volume.check_here()?;
            exported.read_only |= volume.is_read_only();
            volume.check_beside(&exported).map(|()| volume.report.size_bytes)
        })??;
        let owner = Owner::of(self.0.paths.dir());
        let entrance = Entrance::open(&exported, &wish.volume, bytes, owner)?;
        let address = entrance.address();
        exported.address = address.clone();
        self.with(&wish.volume, |volume| {
            if volume.entrances.len() >= MAX_EXPORTS {
                return Err(VolumesError::TooManyExports(wish.volume.clone()));
            }
            volume.check_here()?;
            volume.check_beside(&exported)?;
            volume.order(&VolumeOrder::Export(exported.clone()), Some(&entrance));
            volume.report.exports.push(exported);
            volume.entrances.push(entrance);
            Ok(())
        })??;
        if let ExportAddress::Ublk(Some(number)) = address
            && let Err(error) = ublk::disk::wait_until_served(number)
        {
            // A device that does not appear is no export.
            let wish = Unexport { volume: wish.volume, address, force: true };
            let _ = self.unexport(&wish);
            return Err(ExportError::from(error).into());
        }
        Ok(address)
    }

    /// Copies a volume as of one moment, and waits until the copy is served. This takes as long as
    /// copying does.
    pub fn snapshot(&self, wish: &SnapshotVolume) -> Result<(), VolumesError> {
        check_name(&wish.name)?;
        let (config, size_bytes) = self.with(&wish.volume, |volume| {
            volume.check_here()?;
            volume.check_own()?;
            let config = VolumeConfig {
                name: wish.name.clone(),
                space: random_u64(),
                pages: pages_for_bytes(volume.report.size_bytes),
                for_swap: false,
                spill: None,
                limit_bytes: None,
                write_buffer_bytes: None,
                snapshot_of: Some(wish.volume.clone()),
                ..volume.config.clone()
            };
            Ok::<_, VolumesError>((config, volume.report.size_bytes))
        })??;
        self.enter(config.clone(), size_bytes)?;
        let copied = self.copy(&wish.volume, config);
        let tables = match copied {
            Ok(tables) => tables,
            Err(error) => {
                self.forget(&wish.name);
                return Err(error);
            }
        };
        self.with(&wish.name, |copy| {
            let held = copy.held.hold(vec![STATE.to_owned()], vec![tables]);
            held.expect("a new volume holds nothing yet");
        })?;
        self.start(wish.name.clone())
    }

    /// Has a volume's process copy it, and returns the copy's tables.
    fn copy(&self, name: &str, config: VolumeConfig) -> Result<OwnedFd, VolumesError> {
        let refused = |reason: &str| {
            Err(VolumesError::NoSnapshot { volume: name.to_owned(), reason: reason.to_owned() })
        };
        let is_asked = self.with(name, |volume| {
            let is_asked = matches!(volume.copying, Copying::No) && volume.process.is_some();
            if is_asked {
                volume.copying = Copying::Asked;
                volume.order(&VolumeOrder::Snapshot(Box::new(config)), None);
            }
            is_asked
        })?;
        if !is_asked {
            return refused("its process is starting, or another one is being made; try again");
        }
        let is_undecided = |table: &mut BTreeMap<String, Volume>| {
            let volume = table.get(name);
            volume.is_some_and(|volume| matches!(volume.copying, Copying::Asked))
        };
        let table = self.0.changed.wait_while(self.table(), is_undecided);
        let mut table = table.expect("no thread panics with the table");
        let volume = table.get_mut(name).ok_or_else(|| VolumesError::Unknown(name.to_owned()))?;
        match std::mem::replace(&mut volume.copying, Copying::No) {
            Copying::Done(tables) => Ok(tables),
            Copying::Refused(reason) => refused(&reason),
            Copying::Asked | Copying::No => refused("its process has not made it"),
        }
    }

    /// Gives a volume another size, and waits until it has it.
    pub fn resize(&self, wish: &ResizeVolume) -> Result<(), VolumesError> {
        check_size(wish.size_bytes)?;
        let name = &wish.volume;
        if self.with(name, |volume| volume.config.snapshot_of.is_some())? {
            return Err(VolumesError::IsSnapshot(name.clone()));
        }
        let refused = |reason: &str| {
            Err(VolumesError::NotResized { volume: name.clone(), reason: reason.to_owned() })
        };
        let is_asked = self.with(name, |volume| {
            volume.check_here()?;
            volume.check_own()?;
            let is_asked = volume.resizing == Resizing::No && volume.process.is_some();
            if is_asked {
                volume.resizing = Resizing::Asked(wish.size_bytes);
                volume.order(&VolumeOrder::Resize(wish.size_bytes), None);
            }
            Ok::<_, VolumesError>(is_asked)
        })??;
        if !is_asked {
            return refused("its process is starting, or another size is being set; try again");
        }
        let is_undecided = |table: &mut BTreeMap<String, Volume>| {
            table.get(name).is_some_and(|volume| matches!(volume.resizing, Resizing::Asked(_)))
        };
        let (mut table, _) = self
            .0
            .changed
            .wait_timeout_while(self.table(), STOP_GRACE, is_undecided)
            .expect("no thread panics with the table");
        let volume = table.get_mut(name).ok_or_else(|| VolumesError::Unknown(name.clone()))?;
        match std::mem::replace(&mut volume.resizing, Resizing::No) {
            Resizing::Done => Ok(()),
            Resizing::Refused(reason) => refused(&reason),
            Resizing::Asked(_) | Resizing::No => {
                refused("its process does not answer; `hecaton volume status` tells its size")
            }
        }
    }

    /// Gives a volume's memory back, with all data. Refused while clients are connected, or use its
    /// file.
    pub fn delete(&self, name: &str) -> Result<(), VolumesError> {
        self.with(name, |volume| volume.check_own())??;
        self.end(name)
    }

    /// Ends it, if nobody uses it.
    fn end(&self, name: &str) -> Result<(), VolumesError> {
        self.with(name, |volume| {
            volume.check_here()?;
            if let Some(path) = volume.entrances.iter().find_map(Entrance::file_in_use) {
                return Err(VolumesError::FileInUse {
                    volume: name.to_owned(),
                    path: path.to_owned(),
                    holders: holders::in_words(path),
                });
            }
            volume.deletion = Deletion::Asked;
            volume.order(&VolumeOrder::Delete, None);
            Ok(())
        })??;
        let is_undecided = |table: &mut BTreeMap<String, Volume>| {
            table.get(name).is_some_and(|volume| volume.deletion == Deletion::Asked)
        };
        let (mut table, _) = self
            .0
            .changed
            .wait_timeout_while(self.table(), STOP_GRACE, is_undecided)
            .expect("no thread panics with the table");
        match table.get_mut(name) {
            None => Ok(()),
            Some(volume) => match std::mem::replace(&mut volume.deletion, Deletion::No) {
                Deletion::Refused(clients) => {
                    Err(VolumesError::InUse { volume: name.to_owned(), clients })
                }
                asked => {
                    volume.deletion = asked;
                    Err(VolumesError::StillEnding(name.to_owned()))
                }
            },
        }
    }

    /// Stores the policy's messages to volumes with a spill file. Each process gets its message
    /// when it reports: a stopped one does not report, and would not read the message.
    pub(crate) fn set_words(&self, word_for: impl Fn(&str) -> Option<Word>) {
        let mut table = self.table();
        let spilling = table.iter_mut().filter(|(_, volume)| volume.config.spill.is_some());
        spilling.for_each(|(name, volume)| volume.word = word_for(name));
    }

    /// All volumes as they are now.
    pub fn reports(&self) -> Vec<VolumeReport> {
        self.table().values().map(|volume| volume.report.clone()).collect()
    }

    /// The volumes that clients are connected to, as of their last statistics, or whose files are
    /// used.
    pub fn in_use(&self) -> Vec<String> {
        let is_used = |volume: &&Volume| {
            volume
                .report
                .stats
                .as_ref()
                .is_some_and(|stats| stats.clients > 0 || !stats.readers.is_empty())
                || volume.entrances.iter().any(|entrance| entrance.file_in_use().is_some())
        };
        let table = self.table();
        table.values().filter(is_used).map(|volume| volume.report.name.clone()).collect()
    }

    /// Ends all volumes, and the connections of their clients.
    pub fn stop(&self) {
        self.0.stop.set();
        for volume in self.table().values_mut() {
            volume.report.state = VolumeState::Ending;
            volume.order(&VolumeOrder::End, None);
        }
        if !self.wait_none(STOP_GRACE) {
            self.table().values().for_each(|volume| volume.signal(Signal::KILL));
            self.wait_none(STOP_GRACE);
        }
    }

    fn wait_none(&self, patience: Duration) -> bool {
        let is_any = |table: &mut BTreeMap<String, Volume>| !table.is_empty();
        let (table, _) = self
            .0
            .changed
            .wait_timeout_while(self.table(), patience, is_any)
            .expect("no thread panics with the table");
        table.is_empty()
    }

    /// Enters a volume that is being created, so that nobody else takes the name.
    fn reserve(&self, wish: CreateVolume) -> Result<(), VolumesError> {
        let copies = wish.copies.unwrap_or(self.0.copies);
        let placement = Placement { copies, donors: wish.donors, ranges: Vec::new() };
        placement.check()?;
        let config = VolumeConfig {
            name: wish.name,
            space: random_u64(),
            pages: pages_for_bytes(wish.size_bytes),
            for_swap: wish.for_swap,
            copies: placement.copies,
            site: self.0.donors.site().clone(),
            donors: placement.donors,
            tls_dir: self.0.donors.tls_dir().map(Path::to_owned),
            lease: LEASE,
            donor_patience: wish.donor_patience_s.map_or(LEASE, Duration::from_secs),
            scrub_bytes_per_s: wish.scrub_bytes_per_s.unwrap_or(SCRUB_BYTES_PER_S),
            copying_bytes_per_s: wish.copying_bytes_per_s.unwrap_or(COPYING_BYTES_PER_S),
            failover: wish.failover_ms.map_or(FAILOVER, Duration::from_millis),
            spill: wish.spill,
            limit_bytes: wish.limit_bytes,
            multi_writer: wish.multi_writer,
            write_buffer_bytes: wish.write_buffer_bytes,
            encrypt: wish.encrypt,
            snapshot_of: None,
            reads_from: None,
        };
        self.enter(config, wish.size_bytes)
    }

    fn enter(&self, config: VolumeConfig, size_bytes: u64) -> Result<(), VolumesError> {
        let name = config.name.clone();
        let mut table = self.table();
        if self.0.stop.is_set() {
            return Err(VolumesError::Stopping);
        }
        if table.contains_key(&name) {
            return Err(VolumesError::NameTaken(name));
        }
        if table.len() >= MAX_VOLUMES {
            return Err(VolumesError::TooMany);
        }
        let volume = Volume::new(config, self.free_number(&table), size_bytes);
        table.insert(name, volume);
        Ok(())
    }

    fn free_number(&self, table: &BTreeMap<String, Volume>) -> u64 {
        let is_free = |number: &u64| {
            table.values().all(|volume| volume.number != *number)
                && !self.0.paths.volume_socket(*number).exists()
        };
        (1..).find(is_free).expect("numbers do not end")
    }

    fn outlive(&self, number: u64) -> Option<Outlive> {
        let socket = self.0.paths.volume_socket(number);
        self.0.adopt_within.map(|patience| Outlive { socket, patience })
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Volume>> {
        self.0.table.lock().expect("no thread panics with the table")
    }

    fn with<T>(
        &self,
        name: &str,
        use_it: impl FnOnce(&mut Volume) -> T,
    ) -> Result<T, VolumesError> {
        let mut table = self.table();
        let volume = table.get_mut(name).ok_or_else(|| VolumesError::Unknown(name.to_owned()))?;
        let used = use_it(volume);
        self.0.changed.notify_all();
        Ok(used)
    }

    fn forget(&self, name: &str) {
        self.table().remove(name);
        self.0.news.ring();
        self.0.changed.notify_all();
    }
}

fn check_size(bytes: u64) -> Result<(), VolumesError> {
    match bytes {
        1.. if bytes.is_multiple_of(PAGE_SIZE as u64) => Ok(()),
        _ => Err(VolumesError::Size(bytes)),
    }
}

impl Volume {
    /// One that nobody serves yet.
    fn new(config: VolumeConfig, number: u64, size_bytes: u64) -> Volume {
        let report = VolumeReport {
            name: config.name.clone(),
            size_bytes,
            copies: config.copies,
            spill: config.spill.clone(),
            limit_bytes: config.limit_bytes,
            encrypted: config.encrypt,
            snapshot_of: config.snapshot_of.clone(),
            reads_from: config.reads_from.clone(),
            ..VolumeReport::default()
        };
        Volume {
            config,
            number,
            report,
            entrances: Vec::new(),
            held: HeldFds::default(),
            process: None,
            has_served: false,
            told: Vec::new(),
            word: None,
            told_word: None,
            deletion: Deletion::No,
            resizing: Resizing::No,
            copying: Copying::No,
            unexporting: Unexporting::No,
            handing: Handing::No,
        }
    }

    /// Refused if another node is to have it.
    fn check_here(&self) -> Result<(), VolumesError> {
        match (&self.report.detached, &self.handing) {
            (Some(Offer { to, .. }), _) => {
                let (volume, to) = (self.config.name.clone(), to.clone());
                Err(VolumesError::IsDetached { volume, to })
            }
            (None, Handing::Asked) => Err(VolumesError::IsBeingDetached(self.config.name.clone())),
            _ => Ok(()),
        }
    }

    /// Refuses an export that its other exports exclude. The kernel caches a file's data and writes
    /// at any time, so a file counts as attached for as long as it exists.
    fn check_beside(&self, wanted: &Exported) -> Result<(), VolumesError> {
        let is_disk = |export: &&Exported| matches!(export.address, ExportAddress::Ublk(_));
        if is_disk(&wanted)
            && let Some(other) = self.report.exports.iter().find(is_disk)
        {
            let (volume, other) = (self.config.name.clone(), other.address.clone());
            return Err(VolumesError::IsDisk { volume, other });
        }
        let excludes = |other: &&Exported| {
            (wanted.address.is_of_kernel() || other.address.is_of_kernel())
                && !(wanted.read_only && other.read_only)
        };
        let other = self.report.exports.iter().find(excludes);
        match other.filter(|_| !self.config.multi_writer) {
            Some(other) => Err(VolumesError::FileBeside {
                volume: self.config.name.clone(),
                other: other.address.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Tells its process something; one that is being started is told as it starts.
    fn order(&self, order: &VolumeOrder, entrance: Option<&Entrance>) {
        use std::os::fd::AsFd as _;
        let Some(process) = &self.process else { return };
        let fds: Vec<_> = entrance.iter().map(|entrance| entrance.as_fd()).collect();
        if let Err(error) = crate::channel::send(&process.stream, order, &fds) {
            tracing::debug!(volume = self.config.name, %error, "the process took no order");
        }
    }

    /// Sends its process the policy's message, if that is new or asks for bytes to be taken back.
    fn tell_word(&mut self) {
        let Some(word) = self.word.take() else { return };
        if self.told_word != Some(word) || word.take_back_bytes > 0 {
            let Word { target_bytes: bytes, take_back_bytes } = word;
            self.order(&VolumeOrder::Target { bytes, take_back_bytes }, None);
            self.told_word = Some(word);
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(process) = &self.process {
            process.target.signal(signal);
        }
    }
}
