//! Who may read or write a volume that nodes share, and until when: decisions, without clock, socket or thread.
//!
//! A reader answers its clients from tables that it has fetched, and only while it has a lease from the process that
//! has the volume. That process lets nobody write before the last lease has run out. Neither clock is compared
//! with the other: the reader counts its lease from before it asked, its owner from after it heard that, and waits
//! [`MARGIN`] longer, for clocks that do not run alike.
//!
//! What the tables are of has a number, the *edition*, which is drawn anew for each writer before it is let in. Tables are good with
//! a lease of the same edition only.

use std::collections::BTreeMap;
use std::time::Duration;

/// How long a lease lasts at the reader.
pub(crate) const TERM: Duration = Duration::from_secs(5);

/// How much longer its owner waits: a fifth, and clocks do not differ by so much.
pub(crate) const MARGIN: Duration = Duration::from_secs(1);

/// Most leases at a time.
pub const MAX_READERS: usize = 32;

/// What the process that has the volume knows of its readers.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    /// By session: a node's next process is another reader than the one before.
    granted: BTreeMap<u64, Granted>,
    /// Until then there may be some that a process before this one has granted.
    forgotten_until: Option<Duration>,
}

#[derive(Debug)]
struct Granted {
    node: String,
    until: Duration,
}

/// Who keeps a writer out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// A node that reads.
    Node(String),
    /// Somebody whom a process before this one has let read, for so long.
    Forgotten(Duration),
}

/// There are [`MAX_READERS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooMany;

impl Leases {
    /// Those of a process that follows one which may have granted some, until just now.
    pub(crate) fn after_another(now: Duration) -> Leases {
        Leases { granted: BTreeMap::new(), forgotten_until: Some(now + TERM + MARGIN) }
    }

    /// Grants a lease, or renews it. Whether there was none that still lasted.
    pub(crate) fn grant(
        &mut self,
        session: u64,
        node: &str,
        now: Duration,
    ) -> Result<bool, TooMany> {
        self.expire(now);
        let is_new = !self.granted.contains_key(&session);
        if is_new && self.granted.len() >= MAX_READERS {
            return Err(TooMany);
        }
        let granted = Granted { node: node.to_owned(), until: now + TERM + MARGIN };
        self.granted.insert(session, granted);
        Ok(is_new)
    }

    /// A reader has stopped answering, and says so.
    pub(crate) fn leave(&mut self, session: u64) {
        self.granted.remove(&session);
    }

    /// One that keeps a writer out, if any does.
    pub(crate) fn holder(&mut self, now: Duration) -> Option<Holder> {
        self.expire(now);
        let node = self.granted.values().next().map(|granted| Holder::Node(granted.node.clone()));
        let left = |until: Duration| Holder::Forgotten(until.saturating_sub(now));
        node.or_else(|| self.forgotten_until.map(left))
    }

    /// The nodes that read, each once.
    pub(crate) fn nodes(&mut self, now: Duration) -> Vec<String> {
        self.expire(now);
        let mut nodes: Vec<_> = self.granted.values().map(|lease| lease.node.clone()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    fn expire(&mut self, now: Duration) {
        self.granted.retain(|_, granted| now < granted.until);
        self.forgotten_until = self.forgotten_until.filter(|until| now < *until);
    }
}

/// What a reader knows of its right to answer.
#[derive(Debug, Default)]
pub(crate) struct Tenure {
    /// What its tables are of; 0: of nothing.
    tables: u64,
    lease: Option<Lease>,
    /// Why it has none, as far as its owner has said.
    refused: Option<String>,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    edition: u64,
    until: Duration,
}

/// How a reader stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It may answer from its tables.
    Holds,
    /// Nothing was heard for too long.
    Silent,
    /// Its tables are of what was there before somebody wrote.
    Outdated,
    /// It is not let read, and why.
    Refused(String),
}

impl Tenure {
    /// One with tables of an edition, and no lease.
    pub(crate) fn of_tables(edition: u64) -> Tenure {
        Tenure { tables: edition, ..Tenure::default() }
    }

    /// A lease was granted to who asked for it at that time.
    pub(crate) fn granted(&mut self, asked_at: Duration, edition: u64) {
        self.lease = Some(Lease { edition, until: asked_at + TERM });
        self.refused = None;
    }

    /// None is granted. The one before lasts no longer: what is refused now, may be written now.
    pub(crate) fn refused(&mut self, why: String) {
        self.lease = None;
        self.refused = Some(why);
    }

    /// The tables are of another edition from now on; 0 while they are changed.
    pub(crate) fn set_tables(&mut self, edition: u64) {
        self.tables = edition;
    }

    /// What the tables are of.
    pub(crate) fn tables(&self) -> u64 {
        self.tables
    }

    /// How it stands at a time.
    pub(crate) fn standing(&self, now: Duration) -> Standing {
        match (&self.lease, &self.refused) {
            (_, Some(why)) => Standing::Refused(why.clone()),
            // Once it was heard that somebody wrote, it stays so, lease or not.
            (Some(lease), None) if lease.edition != self.tables => Standing::Outdated,
            (Some(lease), None) if now < lease.until => Standing::Holds,
            _ => Standing::Silent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_silent_reader_is_waited_for() {
        let mut leases = Leases::default();
        assert_eq!(leases.holder(at(0)), None);
        assert_eq!(leases.grant(1, "b", at(0)), Ok(true));
        assert_eq!(leases.grant(1, "b", at(4_000)), Ok(false));
        assert_eq!(leases.holder(at(9_999)), Some(Holder::Node("b".into())));
        assert_eq!(leases.holder(at(10_000)), None);
        assert_eq!(leases.grant(1, "b", at(10_000)), Ok(true), "it was away");
        assert_eq!(leases.grant(2, "b", at(10_000)), Ok(true), "another process");
        assert_eq!(leases.nodes(at(10_001)), ["b"]);
        leases.leave(1);
        assert_eq!(leases.holder(at(10_002)), Some(Holder::Node("b".into())));
        leases.leave(2);
        assert_eq!(leases.holder(at(10_002)), None);
    }

    #[test]
    fn those_that_a_process_before_has_let_in_are_waited_for() {
        let mut leases = Leases::after_another(at(1_000));
        assert_eq!(leases.holder(at(1_000)), Some(Holder::Forgotten(TERM + MARGIN)));
        leases.grant(1, "b", at(2_000)).unwrap();
        leases.leave(1);
        assert_eq!(leases.holder(at(6_999)), Some(Holder::Forgotten(at(1))));
        assert_eq!(leases.holder(at(7_000)), None);
    }

    #[test]
    fn there_are_not_too_many() {
        let mut leases = Leases::default();
        for session in 0..MAX_READERS as u64 {
            leases.grant(session, "b", at(0)).unwrap();
        }
        assert_eq!(leases.grant(99, "c", at(1)), Err(TooMany));
        assert_eq!(leases.grant(0, "b", at(1)), Ok(false));
        assert_eq!(leases.grant(99, "c", at(6_000)), Ok(true));
    }

    #[test]
    fn a_reader_holds_with_a_lease_of_its_tables() {
        let mut tenure = Tenure::of_tables(7);
        assert_eq!(tenure.standing(at(0)), Standing::Silent);
        tenure.granted(at(100), 7);
        assert_eq!(tenure.standing(at(5_099)), Standing::Holds);
        assert_eq!(tenure.standing(at(5_100)), Standing::Silent);
        tenure.refused("no".into());
        assert_eq!(tenure.standing(at(101)), Standing::Refused("no".into()));
        tenure.granted(at(200), 8);
        assert_eq!(tenure.standing(at(201)), Standing::Outdated);
        assert_eq!(tenure.standing(at(9_000)), Standing::Outdated, "it does not forget");
        tenure.set_tables(8);
        assert_eq!((tenure.tables(), tenure.standing(at(201))), (8, Standing::Holds));
    }

    /// Everything that may happen, in any order. Indices are taken modulo what there is.
    #[derive(Clone, Debug)]
    enum Event {
        Passes(u64),
        Asks(usize),
        /// A question reaches the owner, or is lost.
        Heard(usize, bool),
        /// An answer reaches its reader, or is lost.
        Answered(usize, bool),
        FetchesTables(usize),
        HasTables(usize),
        /// Somebody wants to write.
        Writes,
        /// The owner's process is killed, and another one is there.
        Dies,
        /// A reader's is: the next has its tables.
        ReaderDies(usize),
        Leaves(usize),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => (0u64..3_000).prop_map(Event::Passes),
            4 => (0usize..3).prop_map(Event::Asks),
            6 => (0usize..8, prop::bool::weighted(0.9)).prop_map(|(at, is)| Event::Heard(at, is)),
            6 => (0usize..8, prop::bool::weighted(0.9)).prop_map(|(at, is)| Event::Answered(at, is)),
            3 => (0usize..3).prop_map(Event::FetchesTables),
            3 => (0usize..3).prop_map(Event::HasTables),
            3 => Just(Event::Writes),
            1 => Just(Event::Dies),
            1 => (0usize..3).prop_map(Event::ReaderDies),
            1 => (0usize..3).prop_map(Event::Leaves),
        ]
    }

    struct Reader {
        session: u64,
        /// Its clock runs so many thousandths of the owner's, from there.
        rate: u64,
        began: u64,
        tenure: Tenure,
        /// The contents that its tables show.
        contents: u64,
        /// Tables on their way, with their edition.
        coming: Option<(u64, u64)>,
    }

    impl Reader {
        fn clock(&self, now: u64) -> Duration {
            at(self.began + now * self.rate / 1000)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]
        /// No reader answers from tables that are older than what a writer has written.
        #[test]
        fn nobody_reads_what_was_there_before_a_write(
            events in prop::collection::vec(event(), 1..120),
            clocks in prop::collection::vec((900u64..1100, 0u64..1_000_000), 3),
        ) {
            let (mut now, mut contents, mut edition, mut writes) = (0, 0u64, 1u64, 0u32);
            let (mut leases, mut are_out, mut sessions) = (Leases::default(), false, 0u64);
            let mut readers: Vec<Reader> = clocks.into_iter().enumerate().map(|(number, (rate, began))| {
                sessions += 1;
                let tenure = Tenure::default();
                Reader { session: number as u64 + 1, rate, began, tenure, contents: 0, coming: None }
            }).collect();
            let mut asked: Vec<(usize, u64, Duration)> = Vec::new();
            let mut answers: Vec<(usize, u64, Duration, Result<u64, String>)> = Vec::new();
            for event in events {
                match event {
                    Event::Passes(ms) => now += ms,
                    Event::Asks(reader) => {
                        asked.push((reader, readers[reader].session, readers[reader].clock(now)));
                    }
                    Event::Heard(which, is_heard) if !asked.is_empty() => {
                        let (reader, session, asked_at) = asked.remove(which % asked.len());
                        if is_heard {
                            let granted = leases.grant(session, "b", at(now));
                            are_out |= granted.is_ok();
                            let answer = granted.map(|_| edition).map_err(|_| String::new());
                            answers.push((reader, session, asked_at, answer));
                        }
                    }
                    Event::Answered(which, is_heard) if !answers.is_empty() => {
                        let (reader, session, asked_at, answer) = answers.remove(which % answers.len());
                        let reader = &mut readers[reader];
                        if is_heard && reader.session == session {
                            match answer {
                                Ok(edition) => reader.tenure.granted(asked_at, edition),
                                Err(why) => reader.tenure.refused(why),
                            }
                        }
                    }
                    Event::Heard(..) | Event::Answered(..) => {}
                    Event::FetchesTables(reader) => {
                        readers[reader].tenure.set_tables(0);
                        readers[reader].coming = Some((edition, contents));
                    }
                    Event::HasTables(reader) => {
                        let reader = &mut readers[reader];
                        if let Some((edition, contents)) = reader.coming.take() {
                            reader.contents = contents;
                            reader.tenure.set_tables(edition);
                        }
                    }
                    Event::Writes => {
                        if leases.holder(at(now)).is_none() {
                            edition += 1;
                            contents += 1;
                            are_out = false;
                            writes += 1;
                        }
                    }
                    Event::Dies => {
                        leases = match are_out {
                            true => Leases::after_another(at(now)),
                            false => Leases::default(),
                        };
                    }
                    Event::ReaderDies(reader) => {
                        sessions += 10;
                        let reader = &mut readers[reader];
                        reader.session = sessions;
                        reader.tenure = Tenure::of_tables(reader.tenure.tables());
                        reader.coming = None;
                    }
                    Event::Leaves(reader) => {
                        let reader = &mut readers[reader];
                        reader.tenure.refused("it has left".to_owned());
                        leases.leave(reader.session);
                        sessions += 10;
                        reader.session = sessions;
                    }
                }
                for reader in &readers {
                    if reader.tenure.standing(reader.clock(now)) == Standing::Holds {
                        prop_assert_eq!(reader.contents, contents, "after {} writes", writes);
                    }
                }
            }
        }
    }
}
