//! A node: it tells the managers of itself and of its donor, knows the donors that they tell it of,
//! and has its donor do what they want of it.

use super::{Body, Letter, Reply, Request, manager_host};
use crate::borrower::donor_name;
use crate::dice::Dice;
use crate::donor::Donor;
use crate::network::{Host, Network};
use hecaton_donor::Snapshot;
use hecaton_memory::PAGE_SIZE;
use hecaton_node::cluster::donor_directory::DonorDirectory;
use hecaton_node::cluster::membership::Membership;
use hecaton_node::cluster::report::{DonorAddress, HeartbeatAnswer, MemberReport, NodeReport};
use hecaton_node::donors::DonorReport;
use hecaton_node::pagers::{ConsumerReport, PagerState};
use hecaton_pager::placement::DonorUse;
use hecaton_pager::{Site, Stats};
use hecaton_policy::cluster::member::Phase;
use std::collections::BTreeMap;
use std::time::Duration;

/// Time between two heartbeats, and how long a manager may take to answer one.
const INTERVAL: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) struct Node {
    number: usize,
    /// Which directory of the daemon's this is: the same when another daemon finds it.
    boot: u64,
    directory: DonorDirectory,
    /// Pages that its donor has to lend.
    pages: u64,
    membership: Membership,
    /// A manager has answered since it has the memory that it lends.
    is_let_in: bool,
    /// Lives that it has had, of which each was of other memory.
    lives: u64,
    /// Pages that its consumers have at each donor; none if it has no consumers.
    borrowed: Option<BTreeMap<usize, u64>>,
    followed_epoch: u64,
    managers: usize,
    /// The manager that is asked first.
    asks: usize,
    beat: Option<(u64, Duration)>,
    next_beat: Duration,
    calls: u64,
    /// Orders of the managers for its donor.
    pub(super) draining: bool,
    pub(super) limit_bytes: Option<u64>,
    /// There is no daemon until then.
    down_until: Duration,
}

impl Node {
    pub(super) fn new(number: usize, pages: u64, managers: usize) -> Node {
        Node {
            number,
            boot: 1,
            directory: Node::directory(number),
            pages,
            membership: Membership::start(&Node::name(number), 1, pages, false),
            is_let_in: false,
            lives: 1,
            borrowed: None,
            followed_epoch: 0,
            managers,
            asks: number % managers,
            beat: None,
            next_beat: Duration::ZERO,
            calls: 0,
            draining: false,
            limit_bytes: None,
            down_until: Duration::ZERO,
        }
    }

    fn name(number: usize) -> String {
        format!("node-{number}")
    }

    fn directory(number: usize) -> DonorDirectory {
        let own = Node::report_of(number).donor_addresses().collect();
        DonorDirectory::new(Site::unplaced(&Node::name(number)), own)
    }

    fn report_of(number: usize) -> NodeReport {
        let address = Some(([127, 0, 0, 1], 7000 + number as u16).into());
        let donor = DonorReport { name: donor_name(number), address, ..DonorReport::default() };
        NodeReport { name: Node::name(number), donors: vec![donor], ..NodeReport::default() }
    }

    /// As the daemon's own, of what matters here.
    fn report(&self) -> NodeReport {
        let mut report = Node::report_of(self.number);
        (report.boot, report.followed_epoch) = (self.boot, self.followed_epoch);
        report.donors_version = self.directory.version();
        let (pages, draining, told_limit_bytes) = (self.pages, self.drains(), self.limit_bytes);
        report.donors[0].stats =
            Some(Snapshot { pages, draining, told_limit_bytes, ..Snapshot::default() });
        report.donors[0].is_told_to_drain = self.draining;
        report.donors[0].managers_limit_bytes = self.limit_bytes;
        report.member = self.membership.report();
        report.consumers = self.borrowed.iter().map(consumer_of).collect();
        report
    }

    /// Whether its donor lends nothing further.
    pub(super) fn drains(&self) -> bool {
        self.draining || !self.is_let_in || self.membership.is_recovering()
    }

    /// For a message.
    pub(super) fn stands(&self) -> (MemberReport, Option<&BTreeMap<usize, u64>>) {
        (self.membership.report(), self.borrowed.as_ref())
    }

    /// Whether it takes part, and is not about to leave or to be let in.
    pub(super) fn takes_part(&self) -> bool {
        self.membership.report().phase == Phase::Active
    }

    /// The donors that its consumers may borrow from, by number.
    pub(super) fn known(&self) -> Vec<usize> {
        numbers(&self.directory.all())
    }

    /// Those, and all that were once.
    pub(super) fn ever_known(&self) -> Vec<usize> {
        numbers(&self.directory.ever())
    }

    /// Whether it has followed the manager of that epoch last.
    pub(super) fn follows(&self, epoch: u64) -> bool {
        self.followed_epoch == epoch
    }

    /// The daemon dies, and another one comes at that time, which adopts the donor.
    pub(super) fn crash(&mut self, until: Duration) {
        let recovers = self.membership.is_recovering();
        self.succeed(self.membership.life(), recovers);
        self.down_until = until;
    }

    /// The daemon dies with its donor and all that this has lent; others come at once. They know of
    /// the life before, unless their directory is gone too, or the host was booted.
    pub(super) fn lose_memory(&mut self, knows_itself: bool) {
        self.lives += 1;
        self.boot += u64::from(!knows_itself);
        (self.is_let_in, self.draining, self.limit_bytes) = (false, false, None);
        self.succeed(self.lives, knows_itself);
    }

    fn succeed(&mut self, life: u64, recovers: bool) {
        let next = Node::new(self.number, self.pages, self.managers);
        let membership = Membership::start(&Node::name(self.number), life, self.pages, recovers);
        let Node { boot, is_let_in, lives, draining, limit_bytes, calls, .. } = *self;
        let borrowed = self.borrowed.take();
        *self = Node {
            boot,
            is_let_in,
            lives,
            draining,
            limit_bytes,
            calls,
            membership,
            borrowed,
            ..next
        };
    }

    pub(super) fn heal(&mut self) {
        self.down_until = Duration::ZERO;
    }

    pub(super) fn tick(
        &mut self,
        now: Duration,
        donor: &mut Donor,
        borrowed: Option<BTreeMap<usize, u64>>,
        (net, dice): (&mut Network, &mut Dice),
    ) {
        if now < self.down_until {
            return;
        }
        // A donor that was started anew is told once more.
        let pages = self.limit_bytes.map_or(donor.pages(), |bytes| bytes / PAGE_SIZE as u64);
        donor.draining = self.drains();
        self.borrowed = borrowed;
        if donor.told_pages() != pages {
            donor.set_limit(pages, net.now.as_millis() as u64);
        }
        if self.beat.take_if(|(_, until)| *until <= now).is_some() {
            self.asks = (self.asks + 1) % self.managers;
        }
        if self.beat.is_none() && self.next_beat <= now {
            self.send(now, net, dice);
            self.next_beat = now + INTERVAL;
        }
    }

    fn send(&mut self, now: Duration, net: &mut Network, dice: &mut Dice) {
        self.calls += 1;
        self.beat = Some((self.calls, now + PATIENCE));
        let body = Body::Request(Request::Beat(Box::new(self.report())));
        let (from, to) = (Host(self.number), manager_host(self.asks));
        net.post(Letter { from, to, call: self.calls, body }, dice);
    }

    /// Takes a manager's answer to the heartbeat that it waits for.
    pub(super) fn receive(&mut self, call: u64, reply: Reply) {
        if self.beat.take_if(|(waited, _)| *waited == call).is_none() {
            return;
        }
        match reply {
            Reply::Beat(Ok(answer)) => self.follow(*answer),
            // This one leads, and has a reason.
            Reply::Beat(Err(())) => {}
            _ => self.asks = (self.asks + 1) % self.managers,
        }
    }

    fn follow(&mut self, answer: HeartbeatAnswer) {
        assert!(answer.epoch >= self.followed_epoch, "a manager that is over is followed");
        self.followed_epoch = answer.epoch;
        let own = donor_name(self.number);
        self.draining = answer.draining.contains(&own);
        self.limit_bytes = answer.limits.get(&own).copied();
        self.is_let_in = true;
        let leaves = self.draining && self.borrowed.is_none();
        self.membership.follow(&answer.orders, leaves, self.lives + 1);
        self.lives = self.lives.max(self.membership.life());
        self.directory.update(answer.list);
    }
}

/// As a pager tells of it, of what matters here.
fn consumer_of(borrowed: &BTreeMap<usize, u64>) -> ConsumerReport {
    let held = borrowed.iter().map(|(donor, pages)| DonorUse {
        name: donor_name(*donor),
        bytes: pages * PAGE_SIZE as u64,
        ..DonorUse::default()
    });
    let mut stats = Stats::default();
    stats.pool.donors = held.collect();
    ConsumerReport {
        name: "consumer".to_owned(),
        state: PagerState::Serving,
        stats: Some(stats),
        ..ConsumerReport::default()
    }
}

fn numbers(donors: &[DonorAddress]) -> Vec<usize> {
    let number = |name: &str| name.strip_prefix("donor-").and_then(|text| text.parse().ok());
    donors.iter().map(|donor| number(&donor.name).expect("a simulated donor's name")).collect()
}
