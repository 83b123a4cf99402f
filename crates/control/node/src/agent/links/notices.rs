//! Plans the notices to a guest that loses memory, and the wait. Pure: no I/O and no clock.

use hecaton_vm::guest_port::{GuestMessage, HostMessage, Notice};
use hecaton_vm::memory_device::MemoryDevice;
use std::collections::BTreeMap;
use std::time::Duration;

/// Least time between two reminders to a guest, whatever it says.
const BETWEEN_REMINDERS: Duration = Duration::from_secs(1);

/// The notices in force for one guest, and the answers of the guest.
#[derive(Debug)]
pub(crate) struct Notices {
    patience: Option<Duration>,
    last_id: u64,
    /// The machine's size, in bytes.
    size_bytes: u64,
    /// By device that shrinks: the final size to request, in bytes.
    targets: BTreeMap<String, u64>,
    announced: Option<Announced>,
    eviction: Option<Eviction>,
    /// The guest has sent a message, and has let no notice time out since.
    listens: bool,
    /// The guest has given memory late: repeat the request that came before it.
    is_to_be_reminded: bool,
    reminded_at: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
struct Announced {
    id: u64,
    target_bytes: u64,
    /// The smallest size that the guest has offered so far, in bytes.
    least_bytes: u64,
    /// End of the wait for the guest.
    until: Duration,
    /// The wait has timed out: the agent requested memory that the guest had not given.
    is_overdue: bool,
    is_answered: bool,
}

#[derive(Clone, Copy, Debug)]
struct Eviction {
    id: u64,
    deadline: Duration,
}

impl Notices {
    /// `patience`: time for the guest's applications to give memory back before the agent takes the
    /// first batch. None if the guest is not told of sizes.
    pub(crate) fn new(patience: Option<Duration>) -> Notices {
        Notices {
            patience,
            last_id: 0,
            size_bytes: 0,
            targets: BTreeMap::new(),
            announced: None,
            eviction: None,
            listens: false,
            is_to_be_reminded: false,
            reminded_at: None,
        }
    }

    /// Updates the machine's size: `base_bytes`, and the plugged sizes of its devices.
    pub(crate) fn look(&mut self, base_bytes: u64, devices: &[MemoryDevice]) {
        self.size_bytes = base_bytes + devices.iter().map(|one| one.plugged_bytes).sum::<u64>();
    }

    /// Announces that a device will shrink to `target_bytes`. Returns the message, if one is due.
    pub(crate) fn shrink(
        &mut self,
        device: &str,
        target_bytes: u64,
        base_bytes: u64,
        devices: &[MemoryDevice],
        now: Duration,
    ) -> Option<HostMessage> {
        self.look(base_bytes, devices);
        let patience = self.patience?;
        self.targets.insert(device.to_owned(), target_bytes);
        let wanted = |device: &MemoryDevice| {
            *self.targets.get(&device.id).unwrap_or(&device.requested_bytes)
        };
        let target_bytes = base_bytes + devices.iter().map(wanted).sum::<u64>();
        let before = self.announced;
        if before.is_some_and(|before| before.target_bytes == target_bytes) {
            return None;
        }
        // A guest that was ready for a smaller size is not waited for again.
        let is_done = |before: Announced| before.target_bytes <= target_bytes && before.is_answered;
        // Another target does not extend a wait: only what the guest gives does (`may_take`).
        let is_waited_for = |before: &Announced| !before.is_answered && now < before.until;
        let until = before.filter(is_waited_for).map_or(now + patience, |before| before.until);
        self.announced = Some(Announced {
            id: self.next_id(),
            target_bytes,
            least_bytes: u64::MAX,
            until,
            is_overdue: false,
            is_answered: before.is_some_and(is_done),
        });
        self.target_message()
    }

    /// Voids the target of a device that may grow. Cancels the notice once no target is left.
    pub(crate) fn grow(&mut self, device: &str) -> Option<HostMessage> {
        self.targets.remove(device);
        if !self.targets.is_empty() {
            return None;
        }
        self.announced.take().map(|_| HostMessage::Cancelled { what: Notice::Target })
    }

    /// Announces that the machine will be killed at `deadline`. Returns none if this is known.
    pub(crate) fn warn(&mut self, deadline: Duration, now: Duration) -> Option<HostMessage> {
        if self.eviction.is_some_and(|known| known.deadline == deadline) {
            return None;
        }
        self.eviction = Some(Eviction { id: self.next_id(), deadline });
        self.eviction_message(now)
    }

    /// Cancels the eviction.
    pub(crate) fn spare(&mut self) -> Option<HostMessage> {
        self.eviction.take().map(|_| HostMessage::Cancelled { what: Notice::Evict })
    }

    /// Records a message of the guest and returns the answers.
    pub(crate) fn hear(&mut self, message: &GuestMessage, now: Duration) -> Vec<HostMessage> {
        self.listens = true;
        let is_overdue = self.announced.is_some_and(|announced| announced.is_overdue);
        self.is_to_be_reminded |= is_overdue && self.is_awaited(message);
        match message {
            // The guest may know notices of an earlier agent: cancel each that is not in force.
            GuestMessage::Hello => {
                let void = |what| HostMessage::Cancelled { what };
                vec![
                    self.target_message().unwrap_or(void(Notice::Target)),
                    self.eviction_message(now).unwrap_or(void(Notice::Evict)),
                ]
            }
            GuestMessage::Giving { id, size_bytes } => {
                if let Some(announced) = self.announced_as(*id) {
                    announced.least_bytes = announced.least_bytes.min(*size_bytes);
                }
                Vec::new()
            }
            GuestMessage::Ready { id, .. } => {
                if let Some(announced) = self.announced_as(*id) {
                    announced.is_answered = true;
                }
                Vec::new()
            }
        }
    }

    /// Whether the message is news that the agent waits for.
    pub(crate) fn is_awaited(&self, message: &GuestMessage) -> bool {
        let Some(announced) = self.announced.filter(|announced| !announced.is_answered) else {
            return false;
        };
        match message {
            GuestMessage::Hello => false,
            GuestMessage::Giving { id, size_bytes } => {
                *id == announced.id && *size_bytes < announced.least_bytes
            }
            GuestMessage::Ready { id, .. } => *id == announced.id,
        }
    }

    fn announced_as(&mut self, id: u64) -> Option<&mut Announced> {
        self.announced.as_mut().filter(|announced| announced.id == id)
    }

    /// Whether the guest is waited for: it has sent a message, and no notice has timed out since.
    pub(crate) fn listens(&self) -> bool {
        self.listens
    }

    /// Records that the connection to the guest is lost.
    pub(crate) fn is_lost(&mut self) {
        self.listens = false;
    }

    /// Whether the agent may shrink the machine to `size_bytes`: the guest is ready, offers it, has
    /// timed out, or does not listen. An offer that is taken restarts the wait for the rest.
    pub(crate) fn may_take(&mut self, size_bytes: u64, now: Duration) -> bool {
        let (Some(announced), Some(patience)) = (&mut self.announced, self.patience) else {
            return true;
        };
        if announced.is_answered || !self.listens {
            return true;
        }
        if size_bytes >= announced.least_bytes {
            announced.until = now + patience;
            return true;
        }
        if now >= announced.until {
            announced.is_overdue = true;
            self.listens = false;
            return true;
        }
        false
    }

    /// Takes a due reminder: repeat a request that came before the guest gave the memory.
    pub(crate) fn takes_reminder(&mut self, now: Duration) -> bool {
        let is_soon = |at: Duration| now.saturating_sub(at) < BETWEEN_REMINDERS;
        if !self.is_to_be_reminded || self.reminded_at.is_some_and(is_soon) {
            return false;
        }
        self.is_to_be_reminded = false;
        self.reminded_at = Some(now);
        true
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn target_message(&self) -> Option<HostMessage> {
        let size_bytes = self.size_bytes;
        self.announced.map(|Announced { id, target_bytes, .. }| HostMessage::Target {
            id,
            size_bytes,
            target_bytes,
        })
    }

    fn eviction_message(&self, now: Duration) -> Option<HostMessage> {
        self.eviction.map(|Eviction { id, deadline }| HostMessage::Evict {
            id,
            within_ms: u64::try_from(deadline.saturating_sub(now).as_millis()).unwrap_or(u64::MAX),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;

    fn devices(sizes: [u64; 2]) -> Vec<MemoryDevice> {
        let size = |(at, bytes): (usize, &u64)| MemoryDevice {
            id: format!("d{at}"),
            backend: String::new(),
            guest_node: 0,
            block_bytes: 1,
            max_bytes: 8,
            requested_bytes: *bytes,
            plugged_bytes: *bytes,
        };
        sizes.iter().enumerate().map(size).collect()
    }

    fn ready(id: u64) -> GuestMessage {
        GuestMessage::Ready { id, available_bytes: 0, late: Vec::new() }
    }

    fn target(id: u64, size_bytes: u64, target_bytes: u64) -> HostMessage {
        HostMessage::Target { id, size_bytes, target_bytes }
    }

    #[test]
    fn the_final_size_of_the_machine_is_told_once_and_waited_for() {
        let mut notices = Notices::new(Some(S(2)));
        notices.hear(&GuestMessage::Hello, S(0));
        assert!(notices.may_take(0, S(0)), "nothing is to be taken");
        let told = notices.shrink("d0", 4, 10, &devices([8, 6]), S(1));
        assert_eq!(told, Some(target(1, 24, 20)));
        assert!(!notices.may_take(0, S(2)));
        let told = notices.shrink("d1", 2, 10, &devices([8, 6]), S(2));
        assert_eq!(told, Some(target(2, 24, 16)));
        notices.hear(&ready(1), S(2));
        assert!(!notices.may_take(0, S(2)), "what is answered is not in force any more");
        notices.hear(&ready(2), S(2));
        assert!(notices.may_take(0, S(2)));
        let batches = devices([6, 2]);
        assert_eq!(notices.shrink("d0", 4, 10, &batches, S(3)), None, "as it was");
        let told = notices.shrink("d0", 5, 10, &batches, S(3));
        assert_eq!(told, Some(target(3, 18, 17)));
        assert!(notices.may_take(0, S(3)), "it has given more than that");
        assert!(notices.shrink("d0", 0, 10, &batches, S(4)).is_some());
        assert!(!notices.may_take(0, S(4)), "it is to give more");
        assert_eq!(notices.grow("d1"), None);
        let void = HostMessage::Cancelled { what: Notice::Target };
        assert_eq!(notices.grow("d0"), Some(void));
        assert!(notices.may_take(0, S(4)));
    }

    #[test]
    fn who_greets_later_learns_what_the_machine_has_by_then() {
        let mut notices = Notices::new(Some(S(2)));
        notices.shrink("d0", 4, 10, &devices([8, 6]), S(0));
        notices.look(10, &devices([6, 6]));
        let told = notices.hear(&GuestMessage::Hello, S(1));
        assert_eq!(told[0], target(1, 22, 20));
    }

    #[test]
    fn a_size_that_changes_while_it_is_waited_for_gives_no_more_time() {
        let mut notices = Notices::new(Some(S(2)));
        notices.hear(&GuestMessage::Hello, S(0));
        for (second, wanted) in [(0, 6), (1, 4)] {
            notices.shrink("d0", wanted, 10, &devices([8, 6]), S(second));
            assert!(!notices.may_take(0, S(second)));
        }
        assert!(notices.may_take(0, S(2)), "since it was told first");
        // A target after an answer starts a new wait.
        notices.hear(&ready(2), S(3));
        notices.shrink("d0", 2, 10, &devices([8, 6]), S(4));
        assert!(!notices.may_take(0, S(5)));
    }

    #[test]
    fn what_is_given_is_taken_while_the_rest_is_being_given() {
        let mut notices = Notices::new(Some(S(2)));
        notices.hear(&GuestMessage::Hello, S(0));
        notices.shrink("d0", 0, 10, &devices([8, 6]), S(0));
        let giving = |id, size_bytes| GuestMessage::Giving { id, size_bytes };
        assert!(!notices.is_awaited(&giving(2, 20)) && notices.is_awaited(&giving(1, 20)));
        notices.hear(&giving(2, 17), S(1));
        notices.hear(&giving(1, 20), S(1));
        assert!(!notices.is_awaited(&giving(1, 20)), "it is known");
        assert!(!notices.may_take(19, S(1)), "not all of it is there");
        assert!(notices.may_take(20, S(1)));
        assert!(!notices.may_take(16, S(2)), "it has its time for what is left");
        notices.hear(&giving(1, 21), S(2));
        assert!(notices.may_take(20, S(2)), "what was said holds");
        assert!(!notices.may_take(16, S(3)) && notices.may_take(16, S(4)), "it has had its time");
        // Another target starts a new wait.
        notices.hear(&ready(1), S(5));
        notices.shrink("d1", 0, 10, &devices([0, 6]), S(5));
        assert!(!notices.may_take(20, S(5)));
        notices.hear(&giving(2, 18), S(5));
        assert!(notices.may_take(20, S(5)));
        notices.hear(&ready(2), S(5));
        assert!(!notices.is_awaited(&giving(2, 11)) && notices.may_take(10, S(5)), "all is");
    }

    #[test]
    fn who_gives_late_is_asked_once_more() {
        let mut notices = Notices::new(Some(S(2)));
        notices.hear(&GuestMessage::Hello, S(0));
        notices.shrink("d0", 0, 10, &devices([8, 6]), S(0));
        let giving = |size_bytes| GuestMessage::Giving { id: 1, size_bytes };
        notices.hear(&giving(23), S(1));
        assert!(!notices.takes_reminder(S(1)), "nothing was asked for");
        assert!(notices.may_take(16, S(2)) && !notices.takes_reminder(S(2)), "nothing is there");
        notices.hear(&giving(20), S(3));
        assert!(notices.takes_reminder(S(3)) && !notices.takes_reminder(S(3)), "once");
        notices.hear(&giving(18), S(3));
        assert!(!notices.takes_reminder(S(3)) && notices.takes_reminder(S(4)), "not so soon");
        notices.hear(&giving(18), S(5));
        assert!(!notices.takes_reminder(S(5)), "it is known");
        notices.hear(&ready(1), S(6));
        assert!(notices.takes_reminder(S(6)));
        notices.hear(&ready(1), S(7));
        assert!(!notices.takes_reminder(S(7)));
    }

    #[test]
    fn what_nobody_waits_for_is_no_news() {
        let mut notices = Notices::new(Some(S(2)));
        assert!(!notices.is_awaited(&GuestMessage::Hello) && !notices.is_awaited(&ready(0)));
        notices.shrink("d0", 4, 10, &devices([8, 6]), S(0));
        assert!(!notices.is_awaited(&ready(2)) && notices.is_awaited(&ready(1)));
        notices.hear(&ready(1), S(0));
        assert!(!notices.is_awaited(&ready(1)), "it is known");
    }

    #[test]
    fn who_does_not_answer_is_waited_for_once() {
        let mut notices = Notices::new(Some(S(1)));
        notices.shrink("d0", 4, 10, &devices([8, 0]), S(0));
        assert!(notices.may_take(0, S(0)) && !notices.listens(), "nobody is there");
        let told = notices.hear(&GuestMessage::Hello, S(0));
        assert_eq!(told, [target(1, 18, 14), HostMessage::Cancelled { what: Notice::Evict }]);
        assert!(!notices.may_take(0, Duration::from_millis(999)) && notices.listens());
        assert!(notices.may_take(0, S(1)) && !notices.listens(), "it has had its time");
        notices.shrink("d0", 2, 10, &devices([8, 0]), S(9));
        assert!(notices.may_take(0, S(9)));
        notices.hear(&ready(1), S(9));
        assert!(!notices.may_take(0, S(9)), "it is there after all");
        notices.is_lost();
        assert!(notices.may_take(0, S(9)));
    }

    #[test]
    fn a_warning_is_told_once_and_again_to_who_greets() {
        let mut notices = Notices::new(Some(S(2)));
        assert_eq!(notices.spare(), None);
        let warning = |id, within_ms| HostMessage::Evict { id, within_ms };
        assert_eq!(notices.warn(S(30), S(0)), Some(warning(1, 30_000)));
        assert_eq!(notices.warn(S(30), S(1)), None);
        let told = notices.hear(&GuestMessage::Hello, S(10));
        assert_eq!(told, [HostMessage::Cancelled { what: Notice::Target }, warning(1, 20_000)]);
        assert_eq!(notices.spare(), Some(HostMessage::Cancelled { what: Notice::Evict }));
        assert_eq!(notices.warn(S(90), S(60)), Some(warning(2, 30_000)));
    }

    #[test]
    fn sizes_are_not_announced_where_that_is_switched_off() {
        let mut notices = Notices::new(None);
        notices.hear(&GuestMessage::Hello, S(0));
        assert_eq!(notices.shrink("vm0", 0, 8, &[], S(1)), None);
        assert!(notices.may_take(0, S(1)), "nothing is waited for");
        assert!(notices.warn(S(31), S(1)).is_some(), "evictions are");
    }
}
