//! Which of several managers leads.
//!
//! Decisions only: time and the answers of the registry's keeper (etcd) come in as arguments. The
//! leader is the manager that has made the leader's key with a live lease. A manager leads from
//! when it hears so until shortly before its lease would end. The lease counts from when the
//! manager *asked* for it; the keeper counts from later on. So a manager that sleeps, or is cut
//! off, stops leading before another one can begin. Its [`Term`] shuts out its requests that are
//! still in flight.

use std::time::Duration;

/// The time for which one manager leads: the keeper's number for the making of the leader's key.
/// Later terms have higher numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Term(pub u64);

/// Next request to the keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// To lead, or else who does.
    Campaign,
    /// To lead on.
    Renew,
}

/// Answer of the keeper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// This manager leads from now on.
    Won(Term),
    /// Another one does, at this address.
    Other(String),
    /// The lease is renewed.
    Renewed,
    /// There is no such lease any more.
    Gone,
    /// Nothing.
    Silence,
}

/// Change of this manager's role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// This manager begins to lead.
    Lead(Term),
    /// It leads no more.
    Follow,
}

/// Whether this manager leads.
#[derive(Clone, Debug)]
pub struct Election {
    lease: Duration,
    leading: Option<Leading>,
    /// Where the one that leads is, as was heard last.
    leader: Option<String>,
}

#[derive(Clone, Copy, Debug)]
struct Leading {
    term: Term,
    until: Duration,
}

impl Election {
    /// Among managers that all take leases of that length.
    pub fn new(lease: Duration) -> Election {
        Election { lease, leading: None, leader: None }
    }

    /// Request to send now.
    pub fn next(&self, now: Duration) -> Ask {
        match self.leads(now) {
            Some(_) => Ask::Renew,
            None => Ask::Campaign,
        }
    }

    /// Takes the answer to what was asked at `asked`, or that there was none.
    pub fn hear(&mut self, asked: Duration, now: Duration, heard: Heard) -> Option<Turn> {
        let led = self.leading.is_some();
        let until = asked + self.lease - self.margin();
        match heard {
            Heard::Won(term) => {
                self.leader = None;
                // The answer may have taken longer than the lease lasts.
                self.leading = (now < until).then_some(Leading { term, until });
            }
            Heard::Renewed => {
                if let Some(leading) = &mut self.leading {
                    leading.until = leading.until.max(until);
                }
            }
            Heard::Other(url) => {
                self.leading = None;
                self.leader = Some(url);
            }
            Heard::Gone => self.leading = None,
            Heard::Silence => {}
        }
        if self.leads(now).is_none() {
            self.leading = None;
        }
        match (led, self.leading) {
            (false, Some(leading)) => Some(Turn::Lead(leading.term)),
            (true, None) => Some(Turn::Follow),
            _ => None,
        }
    }

    /// The term, if this manager leads at this moment.
    pub fn leads(&self, now: Duration) -> Option<Term> {
        self.leading.filter(|leading| now < leading.until).map(|leading| leading.term)
    }

    /// Where the one that leads is, if another one does.
    pub fn leader(&self) -> Option<&str> {
        self.leader.as_deref()
    }

    /// By how much two clocks may differ over the time of a lease: far more than clocks do.
    fn margin(&self) -> Duration {
        self.lease / 10
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_memory::SplitMix;
    use std::collections::VecDeque;

    const LEASE: Duration = Duration::from_secs(5);
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn who_hears_nothing_stops_to_lead_before_its_lease_ends() {
        let mut election = Election::new(LEASE);
        assert_eq!(election.next(SECOND), Ask::Campaign);
        let turn = election.hear(SECOND, 2 * SECOND, Heard::Won(Term(7)));
        assert_eq!(turn, Some(Turn::Lead(Term(7))));
        assert_eq!(election.next(3 * SECOND), Ask::Renew);
        assert_eq!(election.hear(3 * SECOND, 4 * SECOND, Heard::Renewed), None);
        let end = 3 * SECOND + LEASE;
        assert_eq!(election.leads(end - SECOND), Some(Term(7)));
        // Without anybody telling it so.
        assert_eq!(election.leads(end - Duration::from_millis(1)), None);
        assert_eq!(election.hear(end, end, Heard::Silence), Some(Turn::Follow));
        assert_eq!(election.next(end), Ask::Campaign);
        assert_eq!(election.hear(end, end, Heard::Other("b".into())), None);
        assert_eq!(election.leader(), Some("b"));
    }

    #[test]
    fn a_victory_that_is_told_too_late_is_none() {
        let mut election = Election::new(LEASE);
        assert_eq!(election.hear(SECOND, SECOND + LEASE, Heard::Won(Term(1))), None);
        assert_eq!(election.leads(SECOND + LEASE), None);
    }

    /// The keeper, as etcd is: one key with a lease, and a number for each making of it.
    #[derive(Default)]
    struct Keeper {
        holder: Option<(usize, Duration)>,
        term: u64,
        /// The term of the last write that was taken.
        written: u64,
    }

    impl Keeper {
        fn ask(&mut self, now: Duration, who: usize, ask: Ask) -> Heard {
            self.holder = self.holder.filter(|(_, until)| now < *until);
            match (ask, self.holder) {
                (Ask::Campaign, None) => {
                    self.term += 1;
                    self.holder = Some((who, now + LEASE));
                    Heard::Won(Term(self.term))
                }
                (Ask::Campaign, Some((holder, _))) => Heard::Other(holder.to_string()),
                (Ask::Renew, Some((holder, _))) if holder == who => {
                    self.holder = Some((who, now + LEASE));
                    Heard::Renewed
                }
                (Ask::Renew, _) => Heard::Gone,
            }
        }

        fn write(&mut self, now: Duration, term: Term) -> bool {
            self.holder = self.holder.filter(|(_, until)| now < *until);
            let is_taken = self.holder.is_some() && term.0 == self.term;
            if is_taken {
                assert!(self.written <= term.0, "a write of an earlier term");
                self.written = term.0;
            }
            is_taken
        }
    }

    struct Manager {
        election: Election,
        /// When it asked, when the keeper hears it, when the answer comes, and that.
        asked: Option<(Duration, Duration, Duration, Ask, Option<Heard>)>,
        next_ask: Duration,
        /// It does nothing until then, its thread in the middle of anything.
        sleeps_until: Duration,
        cut_until: Duration,
        writes: VecDeque<(Duration, Term)>,
    }

    /// Managers that sleep, are cut off, and whose messages take their time: at no moment two of
    /// them lead, no write of an earlier term follows one of a later, and with all well again one
    /// leads.
    #[test]
    fn one_leads_at_most_and_one_in_the_end() {
        let mut turns = 0;
        for seed in 0..300 {
            let mut random = SplitMix::new(seed);
            let mut below = |end: u64| Duration::from_millis(random.draw() % end);
            let mut keeper = Keeper::default();
            let manager = || Manager {
                election: Election::new(LEASE),
                asked: None,
                next_ask: Duration::ZERO,
                sleeps_until: Duration::ZERO,
                cut_until: Duration::ZERO,
                writes: VecDeque::new(),
            };
            let mut managers: Vec<Manager> = (0..3).map(|_| manager()).collect();
            let trouble_ends = Duration::from_secs(120);
            let end = trouble_ends + 4 * LEASE;
            let mut now = Duration::ZERO;
            while now < end {
                now += Duration::from_millis(50);
                let is_calm = now >= trouble_ends;
                for (who, manager) in managers.iter_mut().enumerate() {
                    let event = below(2000).as_millis();
                    if !is_calm && event == 0 {
                        manager.sleeps_until = now + below(12_000);
                    } else if !is_calm && event == 1 {
                        manager.cut_until = now + below(12_000);
                    }
                    while let Some((at, term)) = manager.writes.front().copied()
                        && at <= now
                    {
                        manager.writes.pop_front();
                        keeper.write(now, term);
                    }
                    if let Some((asked, reaches, comes, ask, None)) = manager.asked
                        && reaches <= now
                    {
                        let heard = match now < manager.cut_until {
                            true => Heard::Silence,
                            false => keeper.ask(now, who, ask),
                        };
                        manager.asked = Some((asked, reaches, comes, ask, Some(heard)));
                    }
                    if now < manager.sleeps_until {
                        continue;
                    }
                    if let Some((asked, _, comes, _, Some(heard))) = manager.asked.clone()
                        && comes <= now
                    {
                        manager.asked = None;
                        let is_lost = now < manager.cut_until;
                        let heard = if is_lost { Heard::Silence } else { heard };
                        turns += u32::from(manager.election.hear(asked, now, heard).is_some());
                    }
                    if manager.asked.is_none() && manager.next_ask <= now {
                        let (there, back) = match is_calm {
                            true => (below(20), below(20)),
                            false => (below(3000), below(3000)),
                        };
                        let ask = manager.election.next(now);
                        manager.asked = Some((now, now + there, now + there + back, ask, None));
                        manager.next_ask = now + LEASE / 3;
                    }
                    if let Some(term) = manager.election.leads(now) {
                        let slow = if is_calm { below(20) } else { below(8000) };
                        manager.writes.push_back((now + slow, term));
                    }
                }
                let leading = managers.iter().filter(|one| one.election.leads(now).is_some());
                assert!(leading.count() <= 1, "seed {seed}: two lead at {now:?}");
            }
            let leading = managers.iter().filter(|one| one.election.leads(now).is_some());
            assert_eq!(leading.count(), 1, "seed {seed}: nobody leads");
        }
        assert!(turns > 600, "{turns} turns only: nothing was tried");
    }
}
