//! Decides application limits, which application is told next, and when the host is answered.
//!
//! Each step starts from the current memory. The governor keeps the host's announcements and the
//! orders to applications. Two rules always hold. Applications give back one by one, in the given
//! order: the next is told after the one before gave back or timed out. No application is told to
//! grow while another gives back.

mod uncounted;

use crate::governor::uncounted::Uncounted;
use crate::share::{Bounds, least, limits, most};
use crate::state::{ApplicationState, ApplicationStatus, Eviction, State, Target};
use hecaton_vm::guest_port::{GuestMessage, HostMessage, Notice};
use std::time::Duration;

/// Granularity of memory taken from applications beyond what the size demands.
const STEP_BYTES: u64 = 64 << 20;

/// Excess over an announced size up to which the VM counts as shrunk to that size.
const TOLERANCE_BYTES: u64 = 4 << 20;

/// Time for memory to become available after applications gave it back, before they must give more.
const SETTLE_TIME: Duration = Duration::from_secs(2);

/// Time that enough memory must be available before applications get some back.
const RELAX_TIME: Duration = Duration::from_secs(30);

/// Lifetime of an announced size that the VM does not reach: the host's agent may be gone.
const TARGET_LASTS: Duration = Duration::from_secs(600);

/// Lifetime, after its deadline, of an eviction that does not happen.
const EVICTION_LASTS: Duration = Duration::from_secs(60);

/// Memory as the kernel counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// `MemTotal`, in bytes.
    pub total_bytes: u64,
    /// `MemAvailable`, in bytes.
    pub available_bytes: u64,
}

/// Settings of the governor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bytes reserved for everything except the listed applications.
    pub reserve_bytes: u64,
    /// Bytes that must be available at all times.
    pub free_bytes: u64,
    /// Timeout for an application to give back before the next one is told, and for memory to
    /// become available after the last one.
    pub patience: Duration,
}

/// Memory that the host has announced it will take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The host's number of the notice.
    pub id: u64,
    /// Final size of the VM as the host counts it, in bytes.
    pub target_bytes: u64,
    /// Bytes that must still be given back.
    pub owed_bytes: u64,
    /// An application gave back or timed out, or none has to: memory available now is for the host.
    /// Before that, applications that are just being told may be about to use that memory.
    pub is_under_way: bool,
}

/// An action for the caller to carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send an order to an application.
    Tell {
        /// Index of the application.
        application: usize,
        /// The order.
        order: Order,
    },
    /// Send a message to the host.
    Answer(GuestMessage),
}

/// An order to one application.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Sequence number, from 1 on for each application.
    pub number: u64,
    /// Limit of the application, in bytes.
    pub limit_bytes: u64,
    /// Present or future memory of the VM, in bytes.
    pub total_bytes: u64,
    /// Time that the application has to comply.
    pub within: Duration,
    /// Reason for the order.
    pub reason: Reason,
}

/// Reason for an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The first order to this application.
    Start,
    /// The limit falls.
    Shrink,
    /// The limit rises.
    Grow,
    /// The VM will be killed.
    Eviction,
    /// The VM will not be killed after all.
    Spared,
}

/// State of the decisions; see the module header.
#[derive(Clone, Debug)]
pub struct Governor {
    settings: Settings,
    bounds: Vec<Bounds>,
    applications: Vec<Application>,
    memory: Memory,
    uncounted: Uncounted,
    target: Option<Announced>,
    eviction: Option<Doom>,
    squeezed_bytes: u64,
    /// Last time that too little was available, or that applications got squeezed memory back.
    squeezed_at: Duration,
    /// Start of the time in which no application gives back or has to.
    rests_since: Option<Duration>,
}

/// Orders to one application, and its progress.
#[derive(Clone, Debug, Default)]
struct Application {
    order: u64,
    told: Option<Wanted>,
    /// Content of the last order that it carried out; it may not have heard replaced orders.
    knows: Option<Wanted>,
    status: ApplicationStatus,
    /// Time at which it was told to give back.
    since: Duration,
    failure: Option<String>,
}

/// Limit and eviction that an application must know of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    limit_bytes: u64,
    is_evicted: bool,
}

/// A size that the host announced.
#[derive(Clone, Debug)]
struct Announced {
    id: u64,
    size_bytes: u64,
    target_bytes: u64,
    heard_at: Duration,
    /// Final size as the kernel counts it; `None` until the kernel's present count is known.
    total_bytes: Option<u64>,
    /// See [`Announcement`].
    is_under_way: bool,
    /// First time after the notice at which all applications had given back or timed out.
    drained_at: Option<Duration>,
    is_answered: bool,
    /// The VM has shrunk to this size, which bounds the limits until the VM grows again. Its last
    /// blocks may still be in flight; applications that grow by those would have to shrink at once.
    is_reached: bool,
}

/// An eviction that the host announced.
#[derive(Clone, Debug)]
struct Doom {
    id: u64,
    deadline: Duration,
    is_answered: bool,
}

impl Governor {
    /// Governs these applications, which give back in the order of `bounds`.
    pub fn new(settings: Settings, bounds: Vec<Bounds>) -> Governor {
        Governor {
            settings,
            applications: vec![Application::default(); bounds.len()],
            bounds,
            memory: Memory::default(),
            uncounted: Uncounted::default(),
            target: None,
            eviction: None,
            squeezed_bytes: 0,
            squeezed_at: Duration::ZERO,
            rests_since: None,
        }
    }

    /// Records a message of the host.
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

    /// Records that an application has carried out this order. A replaced order is ignored.
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

    /// Records that an application could not be told, or refused. It may still comply.
    pub fn failed(&mut self, application: usize, order: u64, reason: String) {
        if let Some(one) = self.applications.get_mut(application)
            && one.order == order
        {
            one.failure = Some(reason);
        }
    }

    /// Whether an application gives back, or the host waits for an answer.
    pub fn is_busy(&self) -> bool {
        self.rests_since.is_none() || self.target.as_ref().is_some_and(|target| !target.is_answered)
    }

    /// Memory that the host has announced it will take; `None` without an announcement.
    pub fn announced(&self) -> Option<Announcement> {
        self.target.as_ref().map(|target| Announcement {
            id: target.id,
            target_bytes: target.target_bytes,
            owed_bytes: self.owed_bytes(),
            is_under_way: target.is_under_way,
        })
    }

    /// Bytes that must be available at all times.
    pub fn free_bytes(&self) -> u64 {
        self.settings.free_bytes
    }

    /// Updates the state from the current memory, and returns the actions to carry out.
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
        // Not before: applications may just have been told to give the missing memory.
        self.squeeze(now);
        actions.extend(self.answer(now).map(Action::Answer));
        actions
    }

    /// Present size of the VM, or the announced one if it is smaller.
    fn goal_bytes(&self) -> u64 {
        let target = self.target.as_ref().and_then(|target| target.total_bytes);
        target.map_or(self.memory.total_bytes, |target| target.min(self.memory.total_bytes))
    }

    /// Bytes that must still be given back.
    fn owed_bytes(&self) -> u64 {
        self.memory.total_bytes - self.goal_bytes()
    }

    fn look_at_notices(&mut self, now: Duration) {
        let total_bytes = self.memory.total_bytes;
        self.uncounted.look(total_bytes, now);
        if let Some(target) = &mut self.target {
            let final_bytes = *target.total_bytes.get_or_insert_with(|| {
                let uncounted = self.uncounted.learn(target.size_bytes, now);
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

    /// Bytes for applications if none are squeezed: no more than they can use.
    fn budget_bytes(&self) -> u64 {
        let left = self.goal_bytes().saturating_sub(self.settings.reserve_bytes);
        left.min(most(&self.bounds))
    }

    /// Bytes of the budget above the applications' minima.
    fn most_squeezed(&self) -> u64 {
        self.budget_bytes().saturating_sub(least(&self.bounds))
    }

    /// Takes more from applications if too little is available though none gives back any more.
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
            // Half of it: memory that applications get is no longer available.
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
        // A draining application learns of a changed limit at once; its timeout runs on.
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

    /// Returns the answer that the host gets now; each notice is answered once.
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
        // One answer at a time; the other one follows at the next step.
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

    /// State for the API. `kinds`: how each application is told.
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
    /// Whether others wait while it obeys `wanted`: it must give back, or hear of the eviction.
    /// Its first order counts too: its present use is unknown.
    fn gives(&self, wanted: Wanted) -> bool {
        self.told.is_none_or(|told| {
            wanted.limit_bytes < told.limit_bytes || (wanted.is_evicted && !told.is_evicted)
        })
    }
}
