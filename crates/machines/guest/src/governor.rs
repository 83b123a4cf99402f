//! What applications may have, who is told next, and when the host is answered.
//!
//! It looks at levels: each step begins with the memory as it is, and what it remembers is what the host has announced
//! and what the applications were told. Two rules hold over all of it. Applications give back one after the other, in the
//! order given: the next one is told when the one before has done so, or has had its time. And nobody
//! is told to grow while another gives back.

use crate::share::{least, limits, most};
use crate::state::{ApplicationState, ApplicationStatus, Eviction, State, Target};
use hecaton_vm::guest_port::{GuestMessage, HostMessage, Notice};
use std::time::Duration;

/// What is taken from applications, beyond what the size says, is a multiple of this.
const STEP_BYTES: u64 = 64 << 20;

/// How far above an announced size the kernel may count itself when it has shrunk to it.
const TOLERANCE_BYTES: u64 = 4 << 20;

/// How long memory may take to become available once applications have given it back, before they are
/// asked for more.
const SETTLE_TIME: Duration = Duration::from_secs(2);

/// How long enough has to be available before applications get some of it again.
const RELAX_TIME: Duration = Duration::from_secs(30);

/// How long an announced size counts that the machine does not reach: the host's agent may be gone.
const TARGET_LASTS: Duration = Duration::from_secs(600);

/// How long after its time an eviction counts that has not come.
const EVICTION_LASTS: Duration = Duration::from_secs(60);

/// Memory as the kernel counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// `MemTotal`, in bytes.
    pub total_bytes: u64,
    /// `MemAvailable`, in bytes.
    pub available_bytes: u64,
}

/// How it decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// What is left to all that is not listed, in bytes.
    pub reserve_bytes: u64,
    /// What is to be available all the time, in bytes.
    pub free_bytes: u64,
    /// How long an application may take to give back before the next one is told, and memory to be available after
    /// the last.
    pub patience: Duration,
}

/// What an application may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Its name.
    pub name: String,
    /// At all times, in bytes.
    pub min_bytes: u64,
    /// At most, in bytes.
    pub max_bytes: u64,
    /// It is told when the machine is to be evicted.
    pub hears_of_evictions: bool,
}

/// What the host has said that it will take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The host's number of the notice.
    pub id: u64,
    /// What the machine will have in the end, as the host counts it, in bytes.
    pub target_bytes: u64,
    /// What has to go still, in bytes.
    pub owed_bytes: u64,
    /// An application has given back for it, or has had its time, or none has to: what is there now was left over for the host.
    /// Before that it may be what those who are just being told are about to use.
    pub is_under_way: bool,
}

/// Something that is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// An application is to be told.
    Tell {
        /// Which, by its place.
        application: usize,
        /// What.
        order: Order,
    },
    /// The host is to be told.
    Answer(GuestMessage),
}

/// What an application is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Its number, from 1 on for each application.
    pub number: u64,
    /// What it may have, in bytes.
    pub limit_bytes: u64,
    /// What the machine has, or will have, in bytes.
    pub total_bytes: u64,
    /// How long it has.
    pub within: Duration,
    /// Why.
    pub reason: Reason,
}

/// Why an application is told something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It is the first that it is told.
    Start,
    /// It is to have less.
    Shrink,
    /// It may have more.
    Grow,
    /// The machine will be killed.
    Eviction,
    /// The machine will not be killed after all.
    Spared,
}

/// The state; see the module's text.
#[derive(Clone, Debug)]
pub struct Governor {
    settings: Settings,
    bounds: Vec<Bounds>,
    applications: Vec<Application>,
    memory: Memory,
    target: Option<Announced>,
    eviction: Option<Doom>,
    squeezed_bytes: u64,
    /// When too little was available, or some was given back of what was taken for it.
    squeezed_at: Duration,
    /// Since when nobody gives back, nor is to.
    rests_since: Option<Duration>,
}

/// An application as far as it was told.
#[derive(Clone, Debug, Default)]
struct Application {
    order: u64,
    told: Option<Wanted>,
    /// What it was told with the last order that it has carried out: those that were overtaken it may not have heard.
    knows: Option<Wanted>,
    status: ApplicationStatus,
    /// When it was told to give back.
    since: Duration,
    failure: Option<String>,
}

/// What an application is to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    limit_bytes: u64,
    is_evicted: bool,
}

/// A size that was announced.
#[derive(Clone, Debug)]
struct Announced {
    id: u64,
    size_bytes: u64,
    target_bytes: u64,
    heard_at: Duration,
    /// What the kernel will count; once it is known what it counts now.
    total_bytes: Option<u64>,
    /// See [`Announcement`].
    is_under_way: bool,
    /// When all applications had given back, or had had their time, for the first time since.
    drained_at: Option<Duration>,
    is_answered: bool,
    /// The machine has shrunk to it. It bounds what applications may have until the machine grows again: its last
    /// blocks may still be on their way, and who was told to grow by those would be told to shrink at once.
    is_reached: bool,
}

/// An eviction that was announced.
#[derive(Clone, Debug)]
struct Doom {
    id: u64,
    deadline: Duration,
    is_answered: bool,
}

impl Governor {
    /// Of these applications, in the order in which they give back.
    pub fn new(settings: Settings, bounds: Vec<Bounds>) -> Governor {
        Governor {
            settings,
            applications: vec![Application::default(); bounds.len()],
            bounds,
            memory: Memory::default(),
            target: None,
            eviction: None,
            squeezed_bytes: 0,
            squeezed_at: Duration::ZERO,
            rests_since: None,
        }
    }

    /// Takes what the host says.
    pub fn hear(&mut self, message: &HostMessage, now: Duration) {
        match *message {
            HostMessage::Target { id, size_bytes, target_bytes } => {
                self.target = Some(Announced {
                    id,
                    size_bytes,
                    target_bytes,
                    heard_at: now,
                    total_bytes: None,
                    is_under_way: false,
                    drained_at: None,
                    is_answered: false,
                    is_reached: false,
                });
            }
            HostMessage::Evict { id, within_ms } => {
                let deadline = now.saturating_add(Duration::from_millis(within_ms));
                self.eviction = Some(Doom { id, deadline, is_answered: false });
            }
            HostMessage::Cancelled { what: Notice::Target } => self.target = None,
            HostMessage::Cancelled { what: Notice::Evict } => self.eviction = None,
        }
    }

    /// An application has done what this order says. One that was overtaken by another order says nothing.
    pub fn settled(&mut self, application: usize, order: u64) {
        if let Some(one) = self.applications.get_mut(application)
            && one.order == order
        {
            if one.status != ApplicationStatus::Settled
                && let Some(target) = &mut self.target
            {
                target.is_under_way = true;
            }
            one.status = ApplicationStatus::Settled;
            one.knows = one.told;
            one.failure = None;
        }
    }

    /// An application could not be told, or refused. It may still do it.
    pub fn failed(&mut self, application: usize, order: u64, reason: String) {
        if let Some(one) = self.applications.get_mut(application)
            && one.order == order
        {
            one.failure = Some(reason);
        }
    }

    /// Whether somebody gives back, or the host waits for an answer.
    pub fn is_busy(&self) -> bool {
        self.rests_since.is_none() || self.target.as_ref().is_some_and(|target| !target.is_answered)
    }

    /// What the host has announced that it will take; none if it has announced nothing.
    pub fn announced(&self) -> Option<Announcement> {
        self.target.as_ref().map(|target| Announcement {
            id: target.id,
            target_bytes: target.target_bytes,
            owed_bytes: self.owed_bytes(),
            is_under_way: target.is_under_way,
        })
    }

    /// What is to be available all the time, in bytes.
    pub fn free_bytes(&self) -> u64 {
        self.settings.free_bytes
    }

    /// What is to be done now.
    pub fn step(&mut self, memory: Memory, now: Duration) -> Vec<Action> {
        self.memory = memory;
        self.look_at_notices(now);
        for one in &mut self.applications {
            let is_over = now.saturating_sub(one.since) >= self.settings.patience;
            if one.status == ApplicationStatus::Draining && is_over {
                one.status = ApplicationStatus::Late;
                if let Some(target) = &mut self.target {
                    target.is_under_way = true;
                }
            }
        }
        self.squeezed_bytes = self.squeezed_bytes.min(self.most_squeezed());
        let mut actions = self.tell(now);
        // Not before: what is missing may be what they were just told to give.
        self.squeeze(now);
        actions.extend(self.answer(now).map(Action::Answer));
        actions
    }

    /// The size of the machine, or the one to come.
    fn goal_bytes(&self) -> u64 {
        let target = self.target.as_ref().and_then(|target| target.total_bytes);
        target.map_or(self.memory.total_bytes, |target| target.min(self.memory.total_bytes))
    }

    /// What has to be given back still.
    fn owed_bytes(&self) -> u64 {
        self.memory.total_bytes - self.goal_bytes()
    }

    fn look_at_notices(&mut self, now: Duration) {
        let total_bytes = self.memory.total_bytes;
        if let Some(target) = &mut self.target {
            // The host counts what the machine has; what its kernel needs from the start is not in MemTotal.
            let final_bytes = *target.total_bytes.get_or_insert_with(|| {
                let uncounted = target.size_bytes.saturating_sub(total_bytes);
                target.target_bytes.saturating_sub(uncounted)
            });
            let is_there = total_bytes <= final_bytes.saturating_add(TOLERANCE_BYTES);
            let is_old = now.saturating_sub(target.heard_at) >= TARGET_LASTS;
            if is_old || (target.is_reached && !is_there) {
                self.target = None;
            } else if target.is_answered && is_there {
                target.is_reached = true;
            }
        }
        let is_old = |doom: &Doom| now >= doom.deadline.saturating_add(EVICTION_LASTS);
        if self.eviction.as_ref().is_some_and(is_old) {
            self.eviction = None;
        }
    }

    /// What applications may share when nothing is taken from them: what they can use of it.
    fn budget_bytes(&self) -> u64 {
        let left = self.goal_bytes().saturating_sub(self.settings.reserve_bytes);
        left.min(most(&self.bounds))
    }

    /// What they share above their minima.
    fn most_squeezed(&self) -> u64 {
        self.budget_bytes().saturating_sub(least(&self.bounds))
    }

    /// Takes more from applications if too little is available though all of them have done as they were told.
    fn squeeze(&mut self, now: Duration) {
        let Some(since) = self.rests_since else { return };
        let needed = self.settings.free_bytes.saturating_add(self.owed_bytes());
        let available = self.memory.available_bytes;
        if available < needed {
            self.squeezed_at = now;
            if now.saturating_sub(since) >= SETTLE_TIME {
                let more = (needed - available).div_ceil(STEP_BYTES).saturating_mul(STEP_BYTES);
                let squeezed = self.squeezed_bytes.saturating_add(more);
                self.squeezed_bytes = squeezed.min(self.most_squeezed());
                self.rests_since = Some(now);
            }
            return;
        }
        let spare = available - needed;
        let has_lasted = now.saturating_sub(self.squeezed_at) >= RELAX_TIME;
        if self.squeezed_bytes > 0 && spare >= 2 * STEP_BYTES && has_lasted {
            // Half of it: what they get is not available any more.
            self.squeezed_bytes -= self.squeezed_bytes.min(spare / 2);
            self.squeezed_at = now;
        }
    }

    fn wanted(&self) -> Vec<Wanted> {
        let budget = self.budget_bytes().saturating_sub(self.squeezed_bytes);
        let limits = limits(budget, &self.bounds);
        let wanted = limits.into_iter().zip(&self.bounds);
        wanted
            .map(|(limit_bytes, one)| Wanted {
                limit_bytes,
                is_evicted: one.hears_of_evictions && self.eviction.is_some(),
            })
            .collect()
    }

    fn tell(&mut self, now: Duration) -> Vec<Action> {
        let wanted = self.wanted();
        let mut actions = Vec::new();
        // Who gives back already learns at once that it is more, or less, than it was told; its time runs on.
        for (at, wanted) in wanted.iter().enumerate() {
            let one = &self.applications[at];
            if one.status == ApplicationStatus::Draining && one.told != Some(*wanted) {
                actions.push(self.tell_one(at, *wanted, now));
            }
        }
        let drains = |one: &Application| one.status == ApplicationStatus::Draining;
        if !self.applications.iter().any(drains) {
            let gives = (0..wanted.len()).find(|&at| self.applications[at].gives(wanted[at]));
            match gives {
                Some(at) => actions.push(self.tell_one(at, wanted[at], now)),
                None => {
                    for (at, wanted) in wanted.iter().enumerate().rev() {
                        if self.applications[at].told != Some(*wanted) {
                            actions.push(self.tell_one(at, *wanted, now));
                        }
                    }
                }
            }
        }
        match self.applications.iter().any(drains) {
            true => self.rests_since = None,
            false => _ = self.rests_since.get_or_insert(now),
        }
        actions
    }

    fn tell_one(&mut self, at: usize, wanted: Wanted, now: Duration) -> Action {
        let total_bytes = self.goal_bytes();
        let deadline = self.eviction.as_ref().map(|doom| doom.deadline);
        let left = deadline.filter(|_| wanted.is_evicted).map(|at| at.saturating_sub(now));
        let one = &mut self.applications[at];
        let is_less = one.told.is_some_and(|told| wanted.limit_bytes < told.limit_bytes);
        let reason = match (one.knows.map(|known| known.is_evicted), wanted.is_evicted) {
            (None | Some(false), true) => Reason::Eviction,
            (None, false) => Reason::Start,
            (Some(true), false) => Reason::Spared,
            _ if is_less => Reason::Shrink,
            _ => Reason::Grow,
        };
        if one.status != ApplicationStatus::Draining {
            one.since = now;
            one.status = match one.gives(wanted) {
                true => ApplicationStatus::Draining,
                false => ApplicationStatus::Settled,
            };
        }
        one.told = Some(wanted);
        one.order += 1;
        one.failure = None;
        let within = left.unwrap_or(self.settings.patience);
        let order = Order {
            number: one.order,
            limit_bytes: wanted.limit_bytes,
            total_bytes,
            within,
            reason,
        };
        Action::Tell { application: at, order }
    }

    /// What the host is to be told now: each notice is answered once.
    fn answer(&mut self, now: Duration) -> Option<GuestMessage> {
        let rests = self.rests_since.is_some();
        let is_free = self.memory.available_bytes >= self.owed_bytes();
        let patience = self.settings.patience;
        let mut id = None;
        if let Some(target) = self.target.as_mut().filter(|target| !target.is_answered) {
            if rests {
                target.is_under_way = true;
                target.drained_at.get_or_insert(now);
            }
            let is_over = target.drained_at.is_some_and(|at| now.saturating_sub(at) >= patience);
            if (rests && is_free) || is_over {
                target.is_answered = true;
                id = Some(target.id);
            }
        }
        // One at a time; the other one at the next step.
        if id.is_none()
            && rests
            && let Some(doom) = self.eviction.as_mut().filter(|doom| !doom.is_answered)
        {
            doom.is_answered = true;
            id = Some(doom.id);
        }
        let late = |(one, bounds): (&Application, &Bounds)| {
            (one.status == ApplicationStatus::Late).then(|| bounds.name.clone())
        };
        Some(GuestMessage::Ready {
            id: id?,
            available_bytes: self.memory.available_bytes,
            late: self.applications.iter().zip(&self.bounds).filter_map(late).collect(),
        })
    }

    /// The state as it is shown. `kinds`: how each application is told.
    pub fn state(&self, version: u64, kinds: &[&str], now: Duration) -> State {
        let least = self.settings.reserve_bytes.saturating_add(least(&self.bounds));
        let target = self.target.as_ref().filter(|target| !target.is_reached);
        let target = target.map(|target| Target {
            id: target.id,
            total_bytes: self.goal_bytes(),
            is_answered: target.is_answered,
        });
        let eviction = self.eviction.as_ref().map(|doom| Eviction {
            id: doom.id,
            left_ms: u64::try_from(doom.deadline.saturating_sub(now).as_millis())
                .unwrap_or(u64::MAX),
            is_answered: doom.is_answered,
        });
        let applications = self.applications.iter().zip(&self.bounds).zip(kinds);
        let applications = applications.map(|((one, bounds), kind)| ApplicationState {
            name: bounds.name.clone(),
            kind: (*kind).to_owned(),
            order: one.order,
            limit_bytes: one.told.map_or(0, |told| told.limit_bytes),
            status: one.status,
            failure: one.failure.clone(),
        });
        State {
            version,
            total_bytes: self.memory.total_bytes,
            available_bytes: self.memory.available_bytes,
            readied_bytes: 0,
            target,
            eviction,
            squeezed_bytes: self.squeezed_bytes,
            short_bytes: least.saturating_sub(self.goal_bytes()),
            applications: applications.collect(),
        }
    }
}

impl Application {
    /// Whether others wait for it when it is told this: it is to give something back, or to know that it ends. The
    /// first that it is told counts so: nobody knows what it has.
    fn gives(&self, wanted: Wanted) -> bool {
        self.told.is_none_or(|told| {
            wanted.limit_bytes < told.limit_bytes || (wanted.is_evicted && !told.is_evicted)
        })
    }
}
