//! A node: its donors, its pagers, its control socket and its heartbeats, started and stopped as
//! one. `hecaton node` is this and nothing else; `hecaton dev` puts a manager beside it.

use crate::agent::{Agent, AgentConfig, AgentError, CreateError};
use crate::announce::{self, Announcements};
use crate::causes::with_causes;
use crate::children::adopt::{AdoptError, Adopted, adopt};
use crate::children::child::{ChildCommand, adopt_orphans};
use crate::children::limits;
use crate::cluster::donor_directory::DonorDirectory;
use crate::cluster::heartbeat::{HeartbeatError, Heartbeats, ManagerLink, Told};
use crate::cluster::membership::Membership;
use crate::cluster::report::{
    DonorAddress, HeartbeatAnswer, Host, NameError, NodeReport, Orders, check_name,
};
use crate::division::Division;
use crate::donors::parts::keep_division;
use crate::donors::{Donor, DonorReport, DonorSpec, DonorStart, LockAsked, OrphanError};
use crate::node_dir::{DirectoryError, Identity, Lived, NodeDir, Standing};
use crate::pagers::Pagers;
use crate::socket::control::ControlServer;
use crate::socket::message::{Admitted, CreateVm, CreateVolume};
use crate::vms::Vms;
use crate::volumes::{Volumes, VolumesError};
use hecaton_memory::locked::{LockError, lock_process};
use hecaton_memory::{PAGE_SIZE, random_u64};
use hecaton_pager::Site;
use hecaton_pager::adoption::Outlive;
use hecaton_pki::Credentials;
use rustix::process::Pid;
use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Most donors of one node: one for each NUMA node of a large host, or a development cluster.
pub const MAX_DONORS: usize = 64;

/// Heartbeats at the start: those in which a node that has nobody to wait for is let in.
const FIRST_BEATS: usize = 3;

/// How long donors may take to lend, when the manager has let their node in.
const TO_OBEY: Duration = Duration::from_secs(1);

/// How long a donor may take until it serves.
const DONOR_PATIENCE: Duration = Duration::from_secs(20);

/// Configuration of a node.
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
    /// Its donors; empty if it only borrows.
    pub donors: Vec<DonorSpec>,
    /// The manager's base URL, if there is a manager; several have a comma between any two.
    pub manager_url: Option<String>,
    /// Credentials for the connection to the manager; `None` over plain connections.
    pub credentials: Option<Arc<Credentials>>,
    /// The network that is told of its donors, and where it hears of others.
    pub announce: Option<announce::Network>,
    /// How its children are started.
    pub command: ChildCommand,
    /// How long its children outlive it when it is killed, for another node to adopt them; they do
    /// not if nothing is said, and then it adopts none either.
    pub adopt_within: Option<Duration>,
    /// Settings of its host agent, if it runs one.
    pub agent: Option<AgentConfig>,
}

impl NodeConfig {
    fn tls_dir(&self) -> Option<PathBuf> {
        self.credentials.as_ref().map(|credentials| credentials.dir().to_owned())
    }
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
        /// Error of the system call.
        source: io::Error,
    },
    /// A donor does not serve.
    #[error("donor `{donor}` does not start: {reason}")]
    Donor {
        /// The donor.
        donor: String,
        /// The donor's reason, how its process ended, or that it timed out.
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
    /// There cannot be such an agent.
    #[error(transparent)]
    Agent(#[from] AgentError),
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
        /// Error of the system call.
        source: io::Error,
    },
    /// The host cannot be read, or a thread not be started.
    #[error("cannot start the node")]
    Io(#[from] io::Error),
}

/// A running node. [`Node::stop`] ends it and everything that it started.
#[derive(Debug)]
pub struct Node {
    pub(crate) inner: Arc<Inner>,
    /// Emptied when the node stops.
    open: Mutex<Open>,
}

/// The node's ways to the outside.
#[derive(Debug, Default)]
struct Open {
    control: Option<ControlServer>,
    heartbeats: Option<Heartbeats>,
    announcements: Option<Announcements>,
}

/// State that the node's threads share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) name: String,
    location: Option<String>,
    pub(crate) boot: u64,
    dir: NodeDir,
    /// Emptied when the node stops.
    donors: Mutex<Vec<Donor>>,
    /// Highest epoch of a manager whose answer the node followed.
    followed_epoch: AtomicU64,
    /// Most consumers that a heartbeat reports one by one.
    most_told: AtomicUsize,
    /// Heartbeats sent and ended, for threads that wait until the manager has heard one.
    pub(crate) told: Told,
    membership: Mutex<Membership>,
    /// As it was noted last, for a node that is started here should this one be killed.
    lived: Mutex<Lived>,
    division: Mutex<Division>,
    pub(crate) directory: Arc<DonorDirectory>,
    pub(crate) pagers: Pagers,
    pub(crate) vms: Vms,
    pub(crate) volumes: Volumes,
    agent: Option<Agent>,
}

impl Node {
    /// Adopts the donors that an earlier node left, and starts the others. Waits until they serve,
    /// and opens the control socket. On failure it ends all that it started, and leaves adopted
    /// donors as they were.
    pub fn start(mut config: NodeConfig) -> Result<Node, NodeError> {
        check_name(&config.name)?;
        if config.donors.len() > MAX_DONORS {
            return Err(NodeError::TooManyDonors(config.donors.len()));
        }
        for donor in &config.donors {
            check_name(&donor.name)?;
        }
        adopt_orphans()?;
        limits::raise();
        let agent = start_agent(&config)?;
        let identity = config.dir.identity(&config.name);
        let left = match config.adopt_within {
            Some(patience) => left_donors(&config.dir, patience)?,
            None => Vec::new(),
        };
        keep_division(&mut config.donors, left.iter().map(|(_, orphan)| &orphan.word));
        let is_left = |name: &str| left.iter().any(|(_, orphan)| orphan.word.name == name);
        let new = config.donors.iter().map(|spec| spec.name.as_str()).filter(|name| !is_left(name));
        config.dir.write_starts(&config.name, &identity, new)?;
        let mut donors = Vec::new();
        let started = start_donors(&config, left, &mut donors);
        if agent.is_some() {
            shared_memory(&donors).for_each(Donor::await_host_limit);
        }
        let (membership, lived) = begin_life(&config, &identity, &donors);
        let boot = identity.boot;
        let started =
            started.and_then(|()| Ok(config.dir.write_life(&config.name, boot, lived)?));
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
        let directory = DonorDirectory::new(site, own.collect());
        let directory = Arc::new(directory.with_tls(config.tls_dir()));
        let paths = config.dir.paths().clone();
        let pagers = Pagers::new(
            config.command.clone(),
            paths.clone(),
            Arc::clone(&directory),
            config.copies,
            config.adopt_within,
        );
        let volumes = Volumes::new(
            config.command,
            Arc::clone(&directory),
            config.copies,
            paths,
            config.adopt_within,
            pagers.news(),
        );
        let vms = Vms::new(pagers.clone());
        let inner = Arc::new(Inner {
            name: config.name,
            location: config.location,
            boot,
            dir: config.dir,
            donors: Mutex::new(donors),
            followed_epoch: AtomicU64::new(0),
            most_told: AtomicUsize::new(usize::MAX),
            told: Told::default(),
            membership: Mutex::new(membership),
            lived: Mutex::new(lived),
            division: Mutex::default(),
            directory,
            pagers,
            vms,
            volumes,
            agent,
        });
        let node = Node { inner, open: Mutex::default() };
        let manager_url = config.manager_url.as_deref();
        let opened =
            started.and_then(|()| node.open(manager_url, config.credentials, config.announce));
        match opened {
            Ok(()) => Ok(node),
            Err(error) => {
                // Adopted donors hold pages of others, so this node must not stop them.
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

    /// The volumes that it serves.
    pub fn volumes(&self) -> &Volumes {
        &self.inner.volumes
    }

    /// Ends the pagers and what they serve, then the volumes, then the donors, and removes what the
    /// node made.
    pub fn stop(&self) {
        let inner = &*self.inner;
        if let Some(agent) = &inner.agent {
            agent.stop();
        }
        inner.pagers.stop();
        inner.vms.stop();
        inner.volumes.stop();
        let Open { control, heartbeats, announcements } = std::mem::take(&mut *self.lock_open());
        if let Some(heartbeats) = heartbeats {
            heartbeats.stop(inner);
        }
        if let Some(announcements) = announcements {
            announcements.stop(inner);
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
    fn open(
        &self,
        manager_url: Option<&str>,
        credentials: Option<Arc<Credentials>>,
        network: Option<announce::Network>,
    ) -> Result<(), NodeError> {
        // Before the first heartbeat: a client that finds this node in the manager's status may
        // connect at once.
        let path = self.inner.dir.paths().control_socket();
        let listener = UnixListener::bind(&path);
        let listener = listener.map_err(|source| NodeError::ControlSocket { path, source })?;
        let link = manager_url.map(|url| ManagerLink::new(url, credentials));
        if let (Some(link), Some(url)) = (&link, manager_url) {
            for _ in 0..FIRST_BEATS {
                match link.beat(&self.inner.heartbeat()) {
                    Ok(answer) => {
                        self.inner.follow(&answer);
                        self.inner.directory.update(answer.list);
                    }
                    Err(error @ HeartbeatError::Refused { .. }) => {
                        return Err(NodeError::Manager(error));
                    }
                    // It may start later than its nodes: the heartbeats go on trying.
                    Err(
                        error
                        @ (HeartbeatError::NotNow { .. } | HeartbeatError::Unreachable { .. }),
                    ) => {
                        if self.inner.lived().standing != Standing::Lending {
                            let reason = with_causes(&error);
                            tracing::warn!(reason, "nothing is lent until a manager answers");
                        }
                        break;
                    }
                }
            }
            // A borrower that learns of the donors now must find that they already lend.
            self.inner.lock_donors().iter().for_each(|donor| donor.wait_obeyed(TO_OBEY));
            self.inner.dir.write_manager_file(url)?;
        }
        // With the socket bound, where launchers wait, and before any of them is answered.
        self.inner.volumes.adopt_left(&self.inner.dir);
        if self.inner.volumes.are_swapped_to()
            && let Err(error) = self.inner.lock_memory()
        {
            tracing::warn!(%error, "the node may be swapped out to a volume of its own");
        }
        for machine in self.inner.pagers.adopt_left(&self.inner.dir) {
            self.inner.vms.adopt(machine);
        }
        if let Some(agent) = &self.inner.agent {
            agent.open(Arc::downgrade(&self.inner))?;
        }
        let control = ControlServer::start(listener, Arc::downgrade(&self.inner))?;
        self.lock_open().control = Some(control);
        if let Some(link) = link {
            let news = self.inner.pagers.news();
            let heartbeats = Heartbeats::start(link, news, &self.inner)?;
            self.lock_open().heartbeats = Some(heartbeats);
        }
        if let Some(network) = network {
            let announcements = Announcements::start(network, &self.inner)?;
            self.lock_open().announcements = Some(announcements);
        }
        Ok(())
    }

    fn lock_open(&self) -> std::sync::MutexGuard<'_, Open> {
        self.open.lock().expect("no thread panics with it")
    }
}

impl Inner {
    /// Has its donors do what the manager wants of them.
    pub(crate) fn follow(&self, answer: &HeartbeatAnswer) {
        self.followed_epoch.fetch_max(answer.epoch, Ordering::Relaxed);
        let most_told = answer.most_told.map_or(usize::MAX, |most| most as usize);
        self.most_told.store(most_told, Ordering::Relaxed);
        self.follow_policy(answer);
        self.agent.iter().for_each(|agent| agent.follow(answer.harvest));
        let donors = self.lock_donors();
        let is_to_drain = |donor: &Donor| answer.draining.iter().any(|name| *name == donor.name());
        // A node that borrows stays a member: others wait for it when they leave or recover.
        let borrows = self.pagers.count() > 0 || !self.volumes.reports().is_empty();
        let leaves = !borrows && !donors.is_empty() && donors.iter().all(is_to_drain);
        let lends = self.follow_orders(&answer.orders, leaves);
        for donor in donors.iter() {
            donor.set_draining(is_to_drain(donor), !lends);
            donor.set_limit(answer.limits.get(donor.name()).copied());
        }
        if lends {
            let life = self.lived().life;
            self.note(Lived { life, standing: Standing::Lending });
        }
    }

    /// Divides by the policy that the manager names, unless that is of a later version.
    fn follow_policy(&self, answer: &HeartbeatAnswer) {
        let mut division = self.division();
        if let Some(policy) = division.follow(answer.policy.as_ref(), answer.quota_pages) {
            let own = division.policy_in_words();
            tracing::warn!(
                %policy, own,
                "the manager divides the pool by a policy that is not known here: this node goes on by its \
                 own; update it, or set a policy that all nodes know"
            );
        }
    }

    /// Acts upon what the manager says to the node itself. Whether it lends then.
    fn follow_orders(&self, orders: &Orders, leaves: bool) -> bool {
        let mut membership = self.membership();
        membership.follow(orders, leaves, random_u64());
        let life = membership.life();
        let standing = match self.lived().standing {
            _ if membership.is_recovering() => Standing::Recovering,
            Standing::Lending => Standing::Lending,
            _ => Standing::Allowed,
        };
        self.note(Lived { life, standing }) && standing != Standing::Recovering
    }

    /// Saves the node's life and standing if they changed. Returns whether they are saved: the node
    /// must not lend what its successor would not know of.
    fn note(&self, now: Lived) -> bool {
        let mut lived = self.lived();
        if *lived != now {
            match self.dir.write_life(&self.name, self.boot, now) {
                Ok(()) => *lived = now,
                // It is tried again with the next answer.
                Err(error) => tracing::warn!("{}", with_causes(&error)),
            }
        }
        *lived == now
    }

    fn lived(&self) -> std::sync::MutexGuard<'_, Lived> {
        self.lived.lock().expect("no thread panics with it")
    }

    /// Divides what the node may use of the pool among its consumers, at the end of a second.
    pub(crate) fn divide(&self) {
        let donors = self.donor_reports();
        let (consumers, volumes) = (self.pagers.reports(), self.volumes.reports());
        let mut division = self.division();
        division.decide(&donors, &consumers, &volumes);
        self.volumes.set_words(|volume| division.word_for_volume(volume));
    }

    pub(crate) fn division(&self) -> std::sync::MutexGuard<'_, Division> {
        self.division.lock().expect("no thread panics with it")
    }

    fn membership(&self) -> std::sync::MutexGuard<'_, Membership> {
        self.membership.lock().expect("no thread panics with the membership")
    }

    pub(crate) fn report(&self) -> NodeReport {
        // One lock at a time: who has that of the donors takes others ([`Inner::follow`]).
        let member = self.membership().report();
        let pool = self.division().share();
        let mut report = NodeReport {
            name: self.name.clone(),
            boot: self.boot,
            location: self.location.clone(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            // Without /proc the report says zero, which no host has.
            host: Host::here().unwrap_or_default(),
            control_socket: self.dir.paths().control_socket(),
            followed_epoch: self.followed_epoch.load(Ordering::Relaxed),
            donors_version: self.directory.version(),
            member,
            pool,
            donors: self.donor_reports(),
            consumers: self.pagers.reports(),
            untold: None,
            vms: self.vms.reports(),
            volumes: self.volumes.reports(),
            processes: Vec::new(),
            agent: self.agent.as_ref().and_then(Agent::report),
        };
        report.processes = report.running();
        report
    }

    /// The report to the manager, in brief.
    pub(crate) fn heartbeat(&self) -> NodeReport {
        self.report().in_brief(self.most_told.load(Ordering::Relaxed))
    }

    /// Waits until the manager has heard how the node is now, if it answers.
    pub(crate) fn tell_manager(&self) {
        self.told.wait(&self.pagers.news());
    }

    /// Waits until there is memory for a machine; `launcher` is the process that becomes it.
    pub(crate) fn create_machine(
        &self,
        wish: CreateVm,
        launcher: Pid,
    ) -> Result<Admitted, CreateError> {
        let agent = self.agent.as_ref().ok_or(CreateError::NoAgent)?;
        agent.create(wish, launcher.as_raw_nonzero().get().unsigned_abs())
    }

    /// Creates a volume. For a swap volume, first locks the memory of the node and its donors.
    pub(crate) fn create_volume(&self, wish: CreateVolume) -> Result<(), VolumesError> {
        if wish.for_swap {
            let fail = |reason| VolumesError::Start { volume: wish.name.clone(), reason };
            let asked = self.lock_memory().map_err(|error| fail(with_causes(&error)))?;
            let all = asked.into_iter().try_for_each(|donor| donor.wait(DONOR_PATIENCE));
            all.map_err(fail)?;
        }
        self.volumes.create(wish)
    }

    /// Keeps the node and its donors from being swapped out.
    fn lock_memory(&self) -> Result<Vec<LockAsked>, LockError> {
        lock_process()?;
        Ok(self.lock_donors().iter().map(Donor::lock_memory).collect())
    }

    /// The donors as they are now.
    pub(crate) fn donor_reports(&self) -> Vec<DonorReport> {
        self.lock_donors().iter().map(Donor::report).collect()
    }

    /// Bytes that the agent lets a donor lend; 0 for an unknown donor.
    pub(crate) fn host_limit(&self, donor: &str) -> u64 {
        self.lock_donors().iter().find(|one| one.name() == donor).map_or(0, Donor::host_limit)
    }

    /// Sets [`Inner::host_limit`].
    pub(crate) fn set_host_limit(&self, donor: &str, limit_bytes: u64) {
        for one in self.lock_donors().iter().filter(|one| one.name() == donor) {
            one.set_host_limit(limit_bytes);
        }
    }

    fn lock_donors(&self) -> std::sync::MutexGuard<'_, Vec<Donor>> {
        self.donors.lock().expect("no thread panics with the donors")
    }
}

/// Donors whose memory machines could have instead.
fn shared_memory(donors: &[Donor]) -> impl Iterator<Item = &Donor> {
    donors.iter().filter(|donor| !donor.has_huge_pages())
}

/// Before anything else is: that there cannot be one is the user's mistake most often.
fn start_agent(config: &NodeConfig) -> Result<Option<Agent>, AgentError> {
    let Some(agent) = &config.agent else { return Ok(None) };
    Agent::new(agent.clone(), &config.donors, config.manager_url.is_some()).map(Some)
}

/// Membership of a starting node, and the life to save. If its predecessor's loans are gone, others
/// forget them first, and the node lends nothing until then. A node that knows no predecessor waits
/// for a manager, which may know one. Others could not tell earlier loans from lost ones, and would
/// have to find room for them. Without a manager the node lends at once: each borrower notices a
/// loss by the donor's own boot.
fn begin_life(config: &NodeConfig, identity: &Identity, donors: &[Donor]) -> (Membership, Lived) {
    let has_all =
        donors.iter().all(|donor| donor.is_adopted() && !identity.started.contains(donor.name()));
    let killed = identity.killed;
    let Lived { life, standing } = next_life(killed, has_all, random_u64());
    let standing = if config.manager_url.is_some() { standing } else { Standing::Lending };
    let recovers = standing == Standing::Recovering;
    if recovers {
        tracing::info!("what the node before this one has lent is gone: others are told first");
    }
    // Donors of a node that did not lend drain by that node's order, and not by a manager's.
    let were_withheld = killed.is_some_and(|killed| killed.standing != Standing::Lending);
    for donor in donors.iter().filter(|donor| were_withheld || !donor.is_adopted()) {
        donor.set_draining(false, standing != Standing::Lending);
    }
    let home_bytes: u64 = config.donors.iter().map(|donor| donor.lend_bytes).sum();
    let pages = home_bytes / PAGE_SIZE as u64;
    let membership = Membership::start(&config.name, life, pages, recovers);
    (membership, Lived { life, standing })
}

/// Life and standing of a starting node. `has_all`: no page that the `killed` node lent is lost.
fn next_life(killed: Option<Lived>, has_all: bool, new_life: u64) -> Lived {
    let (life, standing) = match killed {
        // Its donors are told now, if they were not.
        Some(Lived { life, standing: Standing::Allowed }) if has_all => (life, Standing::Lending),
        Some(killed) if has_all => (killed.life, killed.standing),
        Some(_) => (new_life, Standing::Recovering),
        None if has_all => (new_life, Standing::Lending),
        None => (new_life, Standing::Waiting),
    };
    Lived { life, standing }
}

/// Adopts donors that are left and starts the others, then waits for all: they take their time side
/// by side.
fn start_donors(
    config: &NodeConfig,
    mut left: Vec<LeftDonor>,
    donors: &mut Vec<Donor>,
) -> Result<(), NodeError> {
    for (_, orphan) in &left {
        let name = &orphan.word.name;
        if !config.donors.iter().any(|spec| spec.name == *name) {
            tracing::warn!(
                donor = name,
                pid = orphan.child.process.pid(),
                "a donor of the node before is none of this one's: it is left alone, and ends by itself; \
                 a node whose donor has its name takes it over"
            );
        }
    }
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
    for (donor, spec) in donors.iter().zip(&config.donors) {
        donor
            .wait_serving(DONOR_PATIENCE)
            .map_err(|reason| NodeError::Donor { donor: spec.name.clone(), reason })?;
    }
    Ok(())
}

/// A donor that the node before this one has left, with the way in which it outlives this one.
type LeftDonor = (Outlive, Adopted<DonorStart>);

fn left_donors(dir: &NodeDir, patience: Duration) -> Result<Vec<LeftDonor>, AdoptError> {
    let mut left = Vec::new();
    for socket in dir.donor_sockets().into_iter().take(MAX_DONORS) {
        if let Some(orphan) = adopt(&socket, patience)? {
            left.push((Outlive { socket, patience }, orphan));
        }
    }
    Ok(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_life_goes_on_only_with_all_that_was_lent() {
        use Standing::{Allowed, Lending, Recovering, Waiting};
        let lived = |life, standing| Lived { life, standing };
        for (before, after) in
            [(Lending, Lending), (Allowed, Lending), (Recovering, Recovering), (Waiting, Waiting)]
        {
            let killed = Some(lived(1, before));
            assert_eq!(next_life(killed, true, 2), lived(1, after), "{before:?}");
            assert_eq!(next_life(killed, false, 2), lived(2, Recovering), "{before:?}");
        }
        assert_eq!(next_life(None, true, 2), lived(2, Lending));
        assert_eq!(next_life(None, false, 2), lived(2, Waiting));
    }
}
