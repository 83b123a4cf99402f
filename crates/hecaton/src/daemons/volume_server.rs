//! `hecaton volume-server`: the process that serves one volume. The node starts it with a socket as
//! its standard input. Down come the volume's settings, its sockets and the tables of the process
//! before it. Up go its tables, for the node to keep, and its state once a second.
//!
//! When the node is killed, the process serves on and waits for another node, to which it repeats
//! that. Without a node it serves clients while they are connected, or use the volume's file.

use anyhow::{Context as _, bail};
use hecaton_block::attach::Attachment;
use hecaton_block::fuse::FileServer;
use hecaton_block::fuse::mount::unmount_when_unused;
use hecaton_block::hand_over::Offering;
use hecaton_block::readers::{Sharing, fetch_tables};
use hecaton_block::requests::reserve;
use hecaton_block::server::{Front as Protocol, Listener};
use hecaton_block::ublk::{self, DiskServer};
use hecaton_block::{Server, Spill, State, Terms, Volume, VolumeConfig, VolumeError};
use hecaton_memory::pages_for_bytes;
use hecaton_node::adoption::{AdoptionSocket, Answer, NodeStream};
use hecaton_node::channel::{self, Receiver};
use hecaton_node::cluster::donor_directory::joined;
use hecaton_node::cluster::report;
use hecaton_node::volumes::{
    ExportAddress, Exported, SPILL, STATE, VolumeEvent, VolumeOrder, VolumeStart,
};
use hecaton_pki::CredentialsDir;
use hecaton_space::{Directory, DonorAddress, Site, SpaceError};
use serde::Serialize;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

/// Time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// The donors, as the node has told of them last.
#[derive(Default)]
struct Donors(Mutex<Vec<DonorAddress>>);

impl Donors {
    fn set(&self, donors: Vec<report::DonorAddress>) {
        let address = |donor: report::DonorAddress| DonorAddress {
            name: donor.name,
            site: Site { host: donor.node, location: donor.location },
            addr: donor.address,
        };
        *self.lock() = donors.into_iter().map(address).collect();
    }

    fn lock(&self) -> MutexGuard<'_, Vec<DonorAddress>> {
        self.0.lock().expect("no thread panics with the donors")
    }
}

impl Directory for Donors {
    fn donors(&self) -> Vec<DonorAddress> {
        self.lock().clone()
    }
}

/// State of a volume's process, whichever node it belongs to.
struct Process {
    volume: Arc<Volume>,
    server: Arc<Server>,
    file: FileServer,
    donors: Arc<Donors>,
    /// First message to a node that adopts this process; sockets, mounts and tables go with it.
    start: VolumeStart,
    fronts: Vec<Front>,
    /// By the labels in `start`.
    kept: Vec<OwnedFd>,
    adoption: Option<AdoptionSocket>,
    /// Hand-over of the volume to another node, while it is offered.
    offering: Arc<Mutex<Option<Arc<Offering>>>>,
}

/// An export and its server.
struct Front {
    /// From the node; the next node gets it, too.
    fd: OwnedFd,
    serving: Serving,
    /// Keeps the tables of another node's volume unchanged; `None` for an own volume.
    _pin: Option<Attachment>,
}

enum Serving {
    Socket(Listener),
    /// By threads that end as it is unmounted.
    File,
    Disk(DiskServer),
    Nodes(Arc<Sharing>),
}

/// Why there are no further orders.
enum Over {
    /// All is given back.
    Released,
    /// The node was killed.
    NodeGone,
}

pub(crate) fn run() -> anyhow::Result<ExitCode> {
    let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut node = NodeStream { receiver: Receiver::new(stream.try_clone()?), stream };
    let start: Option<VolumeStart> = node.receiver.receive().unwrap_or_default();
    let start = start.context("this command is started by `hecaton node`, with a socket to it")?;
    let fds = node.receiver.take_fds(start.exports.len() + start.labels.len())?;
    hecaton_pager::end_on_panic();
    match Process::start(&node, start, fds) {
        Ok(process) => process.run(node)?,
        Err(error) => {
            // The node says it.
            say(&node, &VolumeEvent::Failed(format!("{error:#}")), &[]);
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Process {
    fn start(
        node: &NodeStream,
        mut start: VolumeStart,
        mut fds: Vec<OwnedFd>,
    ) -> anyhow::Result<Process> {
        if start.config.for_swap {
            reserve::begin()?;
        }
        let kept = fds.split_off(start.exports.len());
        let adoption = start.outlive.as_ref().map(AdoptionSocket::listen).transpose();
        let adoption = adoption.context("cannot listen for another node")?;
        let is_new = start.labels.is_empty();
        let state = match is_new {
            true => new_state(&mut start)?,
            false => state_of(&start, kept)?,
        };
        let mut kept = vec![state.as_fd().try_clone_to_owned()?];
        if let Some(spill) = state.spill_fd() {
            kept.push(spill.try_clone_to_owned()?);
        }
        // Before anything is written, so that none of it is lost with this process.
        let held: Vec<_> = kept.iter().map(AsFd::as_fd).collect();
        say(node, &VolumeEvent::HoldFds(start.labels.clone()), &held);
        if start.config.for_swap {
            reserve::finish(&state, start.config.encrypt)?;
        }
        let donors = Arc::new(Donors::default());
        donors.set(start.donors.clone());
        let mut follow = None;
        let opened = match start.config.reads_from.clone() {
            None => Volume::open(start.config.clone(), Arc::<Donors>::clone(&donors), state),
            Some(from) => {
                fetch_tables(&start.config, &from, &state)?;
                let opened = Volume::open_to_read(start.config.clone(), state);
                opened.map(|(volume, begin)| {
                    follow = Some(begin);
                    volume
                })
            }
        };
        if let Err(VolumeError::Space(SpaceError::Fenced { .. })) = &opened {
            // The present holder has a higher epoch.
            say(node, &VolumeEvent::Taken, &[]);
        }
        if opened.is_err()
            && is_new
            && let (Some(path), Some(file)) = (&start.config.spill, kept.pop())
        {
            // The spill file of a volume that will not exist.
            Spill::from_fd(file, path).remove();
        }
        let volume = opened?;
        let server = Arc::new(Server::new(Arc::clone(&volume)));
        let file = FileServer::new(Arc::clone(&volume));
        let (exports, fronts) = (std::mem::take(&mut start.exports), Vec::new());
        let offering = Arc::default();
        let mut process =
            Process { volume, server, file, donors, start, fronts, kept, adoption, offering };
        for (export, fd) in exports.into_iter().zip(fds) {
            if let Some(event) = process.serve(export, fd, false)? {
                say(node, &event, &[]);
            }
        }
        if let Some(follow) = follow {
            // Exports that may have cached something of the predecessor's tables are pinned by now.
            follow()?;
        }
        if let Some(offer) = process.start.detached.clone() {
            let offered = process.offer(Offering::resume(&process.volume, offer));
            if let VolumeEvent::NotDetached(reason) = offered {
                // The next one may.
                bail!("it is detached, and cannot be offered: {reason}");
            }
            say(node, &offered, &[]);
        }
        Ok(process)
    }

    /// Serves an export. Returns what the node is to know of it.
    fn serve(
        &mut self,
        mut export: Exported,
        fd: OwnedFd,
        is_new: bool,
    ) -> io::Result<Option<VolumeEvent>> {
        let mut event = None;
        let (served, role) = (fd.try_clone()?, export.role());
        let serving = match (export.address.front(), &export.address) {
            (Some(front), _) => {
                let certificate = export.tls.clone().map(CredentialsDir::new).map(Arc::new);
                Serving::Socket(self.server.listen(Terms { front, role, certificate }, served)?)
            }
            (None, ExportAddress::Ublk(Some(number))) => {
                let volume = Arc::clone(&self.volume);
                Serving::Disk(DiskServer::serve(volume, *number, served, role)?)
            }
            (None, ExportAddress::Nodes(_)) => {
                let begun = Sharing::begin(&self.volume, served, is_new);
                Serving::Nodes(begun.map_err(io::Error::other)?)
            }
            (None, _) => {
                if !self.file.serve(served, role, export.uring)? && export.uring {
                    event = Some(VolumeEvent::WithoutUring(export.address.clone()));
                    export.uring = false;
                }
                Serving::File
            }
        };
        // An NBD client attaches while it is connected. Caches of other clients are unknown.
        let is_pinned = !matches!(export.address.front(), Some(Protocol::Nbd));
        let _pin = is_pinned.then(|| self.volume.pin()).flatten();
        self.start.exports.push(export);
        self.fronts.push(Front { fd, serving, _pin });
        Ok(event)
    }

    /// Ends an export. The node has ended a file or block device before, and with it the server.
    fn unexport(&mut self, address: &ExportAddress, force: bool) -> VolumeEvent {
        let found = self.start.exports.iter().position(|export| export.address == *address);
        let Some(at) = found else {
            return VolumeEvent::NotUnexported("its process does not know it".to_owned());
        };
        let ended = match &self.fronts[at].serving {
            Serving::Socket(listener) => {
                self.server.unlisten(*listener, force).map_err(|attached| attached.to_string())
            }
            Serving::Nodes(sharing) => sharing.end(force),
            Serving::File | Serving::Disk(_) => Ok(()),
        };
        if let Err(reason) = ended {
            return VolumeEvent::NotUnexported(reason);
        }
        self.start.exports.remove(at);
        self.fronts.remove(at);
        VolumeEvent::Unexported
    }

    /// Serves until a node says that it is enough, or none has come for too long and no client is
    /// connected.
    fn run(mut self, mut node: NodeStream) -> anyhow::Result<()> {
        loop {
            say(&node, &VolumeEvent::Serving, &[]);
            let stream = Arc::new(Mutex::new(node.stream.try_clone()?));
            let reported =
                (Arc::clone(&stream), Arc::clone(&self.volume), Arc::clone(&self.server));
            let offering = Arc::clone(&self.offering);
            let reports = thread::Builder::new().name("volume-reports".into());
            reports.spawn(move || report(&reported.0, &reported.1, &reported.2, &offering))?;
            match self.obey(&mut node.receiver, &stream)? {
                Over::Released => return Ok(()),
                Over::NodeGone => {}
            }
            let next = match &mut self.adoption {
                Some(adoption) => {
                    let (volume, patience) = (self.volume.name(), adoption.outlive().patience);
                    tracing::warn!(
                        volume,
                        ?patience,
                        "the node is gone; serving on until another comes"
                    );
                    adoption.wait(Some(patience))?
                }
                None => None,
            };
            let Some(next) = next else { break };
            node = next;
            self.start.outlive = self.adoption.as_ref().map(|adoption| adoption.outlive().clone());
            let fronts = self.fronts.iter().map(|front| front.fd.as_fd());
            let fds: Vec<_> = fronts.chain(self.kept.iter().map(AsFd::as_fd)).collect();
            say(&node, &Answer::Adopted(&self.start), &fds);
        }
        let volume = self.volume.name();
        tracing::warn!(volume, "there is no node; clients are served until they go");
        for export in &self.start.exports {
            match &export.address {
                ExportAddress::Fuse(path) => unmount_when_unused(path),
                ExportAddress::Ublk(Some(number)) => ublk::disk::remove_when_unused(*number),
                _ => {}
            }
        }
        self.server.close_when_unused();
        self.release();
        Ok(())
    }

    fn obey(
        &mut self,
        receiver: &mut Receiver,
        node: &Arc<Mutex<UnixStream>>,
    ) -> anyhow::Result<Over> {
        loop {
            let order = match receiver.receive() {
                Ok(Some(order)) => order,
                Ok(None) => return Ok(Over::NodeGone),
                Err(error) => {
                    tracing::warn!(%error, "what the node says is not understood");
                    return Ok(Over::NodeGone);
                }
            };
            match order {
                VolumeOrder::Export(export) => {
                    let fd = receiver.take_fds(1)?.remove(0);
                    let served =
                        self.serve(export, fd, true).context("cannot serve a further address");
                    if let Some(event) = served? {
                        tell(node, &event);
                    }
                }
                VolumeOrder::Unexport { address, force } => {
                    tell(node, &self.unexport(&address, force));
                }
                VolumeOrder::Donors(known) => {
                    // Another node is to know of all that may have some of it.
                    let before = std::mem::take(&mut self.start.donors);
                    self.start.donors = joined(known.clone(), before);
                    self.donors.set(known);
                }
                VolumeOrder::Resize(bytes) => {
                    let answer = match self.volume.resize(pages_for_bytes(bytes)) {
                        Ok(()) => VolumeEvent::Resized,
                        Err(error) => VolumeEvent::NotResized(error.to_string()),
                    };
                    tell(node, &answer);
                }
                VolumeOrder::Target { bytes, take_back_bytes } => {
                    self.volume.set_target(bytes, take_back_bytes);
                }
                VolumeOrder::Snapshot(config) => {
                    let (volume, node) = (Arc::clone(&self.volume), Arc::clone(node));
                    let donors = Arc::<Donors>::clone(&self.donors);
                    let thread = thread::Builder::new().name("snapshot".into());
                    thread.spawn(move || snapshot(&volume, *config, donors, &node))?;
                }
                VolumeOrder::Detach(offer) => {
                    let begun = Offering::begin(&self.volume, offer);
                    tell(node, &self.offer(begun));
                }
                VolumeOrder::Keep => {
                    tell(node, &self.keep());
                }
                VolumeOrder::Delete => match self.close_if_unused() {
                    Ok(()) => {
                        self.release();
                        tell(node, &VolumeEvent::Released);
                        return Ok(Over::Released);
                    }
                    Err(in_use) => {
                        tell(node, &VolumeEvent::InUse(in_use));
                    }
                },
                VolumeOrder::End => {
                    self.release();
                    tell(node, &VolumeEvent::Released);
                    return Ok(Over::Released);
                }
            }
        }
    }

    /// Takes no further client, if there is none, nor a node that reads.
    fn close_if_unused(&self) -> Result<(), usize> {
        match self.volume.stats(0).readers.len() {
            0 => self.server.close_if_unused().map_err(|in_use| in_use.0),
            readers => Err(readers + self.server.clients()),
        }
    }

    /// The volume is offered to another node, or not.
    fn offer(&mut self, begun: Result<Arc<Offering>, String>) -> VolumeEvent {
        match begun {
            Ok(offering) => {
                let offer = offering.offer().clone();
                self.start.detached = Some(offer.clone());
                *self.offering.lock().expect("no thread panics with it") = Some(offering);
                VolumeEvent::Detached(offer)
            }
            Err(reason) => VolumeEvent::NotDetached(reason),
        }
    }

    /// Offers it no more.
    fn keep(&mut self) -> VolumeEvent {
        let mut offering = self.offering.lock().expect("no thread panics with it");
        match offering.as_ref().map_or(Ok(()), |offering| offering.withdraw()) {
            Ok(()) => {
                *offering = None;
                self.start.detached = None;
                VolumeEvent::Kept
            }
            Err(given) => VolumeEvent::NotKept(given.to_string()),
        }
    }

    fn release(&mut self) {
        self.file.stop();
        for front in self.fronts.drain(..) {
            match front.serving {
                Serving::Disk(disk) => disk.stop(),
                Serving::Nodes(sharing) => sharing.stop(),
                Serving::File | Serving::Socket(_) => {}
            }
        }
        self.server.stop();
        if self.volume.is_given() {
            // Another node has the memory, or will; else donors free it when the lease ends.
            return;
        }
        if let Err(error) = self.volume.release() {
            // A donor that cannot be reached has its memory back when the lease ends.
            tracing::warn!(volume = self.volume.name(), %error, "not all donors could be told");
        }
    }
}

/// Copies the volume and tells the node the result. Drops a copy that the node does not take.
fn snapshot(
    volume: &Arc<Volume>,
    config: VolumeConfig,
    donors: Arc<Donors>,
    node: &Mutex<UnixStream>,
) {
    let told = volume
        .snapshot(config, donors)
        .map_err(|error| format!("{:#}", anyhow::Error::from(error)))
        .and_then(|snapshot| {
            let tables = snapshot.state().map_err(|error| error.to_string())?;
            let stream = node.lock().expect("no thread panics as it tells");
            let sent = channel::send(&stream, &VolumeEvent::Snapshot, &[tables.as_fd()]);
            sent.map_err(|error| error.to_string())?;
            snapshot.taken();
            Ok(())
        });
    if let Err(reason) = told {
        tell(node, &VolumeEvent::NoSnapshot(reason));
    }
}

/// The tables of a volume that is new, and its file.
fn new_state(start: &mut VolumeStart) -> anyhow::Result<State> {
    let state = State::create(start.config.pages)?;
    start.labels.push(STATE.to_owned());
    let spill = start.config.spill.as_deref().map(Spill::create).transpose()?;
    start.labels.extend(spill.iter().map(|_| SPILL.to_owned()));
    Ok(state.with_spill(spill))
}

/// Those that the process before this one has left, with whatever labels.
fn state_of(start: &VolumeStart, kept: Vec<OwnedFd>) -> anyhow::Result<State> {
    let (mut state, mut file) = (None, None);
    for (label, fd) in start.labels.iter().zip(kept) {
        match label.as_str() {
            STATE => state = Some(fd),
            SPILL => file = Some(fd),
            other => bail!("the node sends a descriptor `{other}`, which is not known"),
        }
    }
    let state = State::from_fd(state.context("the node sends no tables")?)?;
    let spill = match (&start.config.spill, file) {
        (Some(path), Some(file)) => Some(Spill::from_fd(file, path)),
        (None, None) => None,
        _ => bail!("the node sends another spill file than the volume has"),
    };
    Ok(state.with_spill(spill))
}

/// A node that does not take it has been killed, which is seen when it is listened to.
fn say(node: &NodeStream, what: &impl Serialize, fds: &[BorrowedFd<'_>]) {
    if let Err(error) = channel::send(&node.stream, what, fds) {
        tracing::debug!(%error, "the node did not take what the volume had to say");
    }
}

/// As [`say`], while another thread reports: a line is sent as a whole.
fn tell(node: &Mutex<UnixStream>, event: &VolumeEvent) -> bool {
    let stream = node.lock().expect("no thread panics as it tells");
    channel::send(&stream, event, &[]).is_ok()
}

/// Reports until the node is gone.
fn report(
    node: &Mutex<UnixStream>,
    volume: &Volume,
    server: &Server,
    offering: &Mutex<Option<Arc<Offering>>>,
) {
    let stats = || Box::new(volume.stats(server.clients() as u64));
    let is_taken = || {
        let offering = offering.lock().expect("no thread panics with it");
        volume.is_fenced() || offering.as_ref().is_some_and(|offering| offering.is_taken())
    };
    while tell(node, &VolumeEvent::Stats(stats())) {
        if is_taken() {
            tell(node, &VolumeEvent::Taken);
        }
        thread::sleep(REPORT_INTERVAL);
    }
}
