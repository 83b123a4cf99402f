//! The registry of the manager that leads, and where it is written down: nowhere, in a file, or in
//! etcd.

use crate::etcd::{Etcd, EtcdError, Seat};
use crate::records::book::Book;
use crate::records::election::Term;
use crate::records::lasting::Lasting;
use crate::records::store::{Store, StoreError};
use crate::registry::Registry;
use hecaton_policy::cluster::choice::Choice;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The manager logs writes that take longer. Commands give up an only manager after 20 s.
const SLOW_WRITE: Duration = Duration::from_secs(1);

/// Where a manager keeps its registry.
#[derive(Debug)]
pub enum Keep {
    /// In memory: whoever comes after it knows what nodes and donors tell.
    InMemory,
    /// In a file of this directory.
    In(PathBuf),
    /// In etcd, where several managers take turns.
    Etcd(Etcd),
}

/// Why nothing is read from the registry, or written to it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LedgerError {
    /// Another manager leads, or none yet.
    #[error("{}", not_leading(.0.as_deref()))]
    NotLeading(Option<String>),
    /// The file refuses.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// etcd refuses.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
}

fn not_leading(leader: Option<&str>) -> String {
    match leader {
        Some(url) => format!("this manager does not lead; the one at {url} does"),
        None => {
            "this manager does not lead, and none may yet: try again in some seconds".to_owned()
        }
    }
}

#[derive(Debug)]
enum Keeper {
    Memory,
    File(Store),
    Etcd(Arc<Seat>),
}

#[derive(Debug)]
pub(crate) struct Ledger {
    book: Book,
    /// The book's clock.
    begun: Instant,
    keeper: Keeper,
}

impl Ledger {
    pub(crate) fn in_memory() -> Ledger {
        Ledger::of(Registry::default(), Keeper::Memory)
    }

    pub(crate) fn in_file(store: Store, lasting: Lasting) -> Result<Ledger, StoreError> {
        let mut registry = Registry::new(lasting);
        let mut store = store;
        store.write(registry.changes())?;
        registry.written();
        Ok(Ledger::of(registry, Keeper::File(store)))
    }

    /// Ledger of a manager that does not lead yet.
    pub(crate) fn in_etcd(seat: Arc<Seat>) -> Ledger {
        Ledger::of(Registry::default(), Keeper::Etcd(seat))
    }

    fn of(registry: Registry, keeper: Keeper) -> Ledger {
        Ledger { book: Book::new(registry, Duration::ZERO), begun: Instant::now(), keeper }
    }

    /// Takes over the registry that another manager has left. This one leads in `term`. The epoch
    /// of `registry` is written already: from now on, answers carry it.
    pub(crate) fn take_over(&mut self, term: Term, registry: Registry) {
        self.book.take_over(term, registry, self.begun.elapsed());
    }

    /// The term that the registry is of.
    pub(crate) fn term(&self) -> Option<Term> {
        self.book.term()
    }

    /// Reads the registry, if this manager leads.
    pub(crate) fn see<T>(
        &self,
        look: impl FnOnce(&Registry, Duration) -> T,
    ) -> Result<T, LedgerError> {
        self.check()?;
        Ok(self.book.see(self.begun.elapsed(), look))
    }

    /// Changes the registry, and returns when the change is written: only then may the answer
    /// leave. If the write fails, the change must be written before the next answer.
    pub(crate) fn change<T>(
        &mut self,
        act: impl FnOnce(&mut Registry, Duration) -> T,
    ) -> Result<T, LedgerError> {
        self.check()?;
        let (now, before) = (self.begun.elapsed(), self.policy_instead());
        let outcome = self.book.change(now, act);
        if let Some(instead) = self.policy_instead().filter(|instead| before != Some(*instead)) {
            tracing::warn!(
                "the policy in the registry is of a later version than this manager, and stays there as it is; \
                 the pool is divided by {instead} until this manager is updated, or a policy is set"
            );
        }
        match self.book.unwritten().is_some() && !matches!(self.keeper, Keeper::Memory) {
            // It waits for a disk or a network, with which the runtime's other thread need not.
            true => tokio::task::block_in_place(|| self.write())?,
            false => self.book.written(),
        }
        Ok(outcome)
    }

    fn policy_instead(&self) -> Option<Choice> {
        self.book.see(Duration::ZERO, |registry, _| registry.policy_instead())
    }

    fn check(&self) -> Result<(), LedgerError> {
        match &self.keeper {
            Keeper::Memory | Keeper::File(_) => Ok(()),
            Keeper::Etcd(seat) if self.book.is_of(seat.term()) => Ok(()),
            Keeper::Etcd(seat) => Err(LedgerError::NotLeading(seat.leader())),
        }
    }

    fn write(&mut self) -> Result<(), LedgerError> {
        let Some(changes) = self.book.unwritten() else { return Ok(()) };
        let began = Instant::now();
        match (&mut self.keeper, self.book.term()) {
            (Keeper::Memory, _) => {}
            (Keeper::File(store), _) => store.write(changes)?,
            // Whatever term it is: etcd knows whether another has begun since.
            (Keeper::Etcd(seat), Some(term)) => seat.write(term, changes)?,
            (Keeper::Etcd(seat), None) => return Err(LedgerError::NotLeading(seat.leader())),
        }
        let took = began.elapsed();
        if took > SLOW_WRITE {
            let ms = took.as_millis() as u64;
            tracing::warn!(ms, "the registry took long to write; nobody was answered meanwhile");
        }
        self.book.written();
        Ok(())
    }
}
