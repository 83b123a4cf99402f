//! The registry of the manager that leads, and where it is written down: nowhere, in a file, or in
//! etcd.
//!
//! A disk may take many seconds for a write. Requests go on meanwhile: they read the registry and
//! change it, and each answer to a change waits until that change is written.

use crate::etcd::{Etcd, EtcdError, Seat};
use crate::records::book::{Book, Durability, Receipt, Write};
use crate::records::election::Term;
use crate::records::lasting::Lasting;
use crate::records::store::{Store, StoreError};
use crate::registry::Registry;
use hecaton_node::with_causes;
use hecaton_policy::cluster::choice::Choice;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The manager logs writes that take longer.
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
    /// The change is made, and could not be written. The next write contains it again.
    #[error(transparent)]
    Unwritten(Arc<WriteError>),
    /// The change is made, and not written in the time for which the answer may wait.
    #[error(
        "the manager has taken this, and its registry takes longer than {} s to be written; ask \
         again to learn when it is",
        .0.as_secs_f64()
    )]
    Slow(Duration),
}

/// Why the registry could not be written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
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
    /// Locked by the one write that is under way.
    File(Mutex<Store>),
    Etcd(Arc<Seat>),
}

#[derive(Debug)]
struct Open {
    book: Book,
    /// Why the last write failed that did.
    refusal: Option<Arc<WriteError>>,
}

#[derive(Debug)]
pub(crate) struct Ledger {
    /// Never locked for longer than it takes to read the registry, or to change it.
    open: Mutex<Open>,
    /// The book's clock.
    begun: Instant,
    keeper: Keeper,
    /// Tells that a write has ended, or that another registry was taken over.
    turned: watch::Sender<()>,
}

impl Ledger {
    pub(crate) fn in_memory() -> Arc<Ledger> {
        Ledger::of(Registry::default(), Keeper::Memory)
    }

    pub(crate) fn in_file(store: Store, lasting: Lasting) -> Result<Arc<Ledger>, StoreError> {
        let mut registry = Registry::new(lasting);
        let mut store = store;
        store.write(registry.changes())?;
        registry.written();
        Ok(Ledger::of(registry, Keeper::File(Mutex::new(store))))
    }

    /// Ledger of a manager that does not lead yet.
    pub(crate) fn in_etcd(seat: Arc<Seat>) -> Arc<Ledger> {
        Ledger::of(Registry::default(), Keeper::Etcd(seat))
    }

    fn of(registry: Registry, keeper: Keeper) -> Arc<Ledger> {
        let open = Open { book: Book::new(registry, Duration::ZERO), refusal: None };
        let (open, turned) = (Mutex::new(open), watch::Sender::new(()));
        Arc::new(Ledger { open, begun: Instant::now(), keeper, turned })
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().expect("no thread panics with the registry")
    }

    /// Takes over the registry that another manager has left. This one leads in `term`. The epoch
    /// of `registry` is written already: from now on, answers carry it.
    pub(crate) fn take_over(&self, term: Term, registry: Registry) {
        self.open().book.take_over(term, registry, self.begun.elapsed());
        self.turned.send_replace(());
    }

    /// The term that the registry is of.
    pub(crate) fn term(&self) -> Option<Term> {
        self.open().book.term()
    }

    /// Reads the registry, if this manager leads. It may say what is not written yet.
    pub(crate) fn see<T>(
        &self,
        look: impl FnOnce(&Registry, Duration) -> T,
    ) -> Result<T, LedgerError> {
        let open = self.open();
        self.check(&open.book)?;
        Ok(open.book.see(self.begun.elapsed(), look))
    }

    /// Changes the registry, and returns when the change is written: only then may the answer
    /// leave. A refusal returns at once, because it promises nothing. If the write fails or takes
    /// longer than `wait`, the change is still made, and must be written before the next answer.
    pub(crate) async fn change<T, E>(
        self: &Arc<Self>,
        wait: Duration,
        act: impl FnOnce(&mut Registry, Duration) -> Result<T, E>,
    ) -> Result<Result<T, E>, LedgerError> {
        let mut turned = self.turned.subscribe();
        let (outcome, receipt) = self.act(act)?;
        if outcome.is_err() {
            return Ok(outcome);
        }
        let durable = async {
            loop {
                if let Some(durable) = self.outcome(receipt) {
                    return durable;
                }
                turned.changed().await.expect("the ledger tells it as long as it exists");
            }
        };
        tokio::time::timeout(wait, durable).await.unwrap_or(Err(LedgerError::Slow(wait)))?;
        Ok(outcome)
    }

    /// Changes the registry, and has the change written by a thread that may wait for a disk or a
    /// network.
    fn act<T>(
        self: &Arc<Self>,
        act: impl FnOnce(&mut Registry, Duration) -> T,
    ) -> Result<(T, Receipt), LedgerError> {
        let mut open = self.open();
        self.check(&open.book)?;
        let before = policy_instead(&open.book);
        let (outcome, receipt) = open.book.change(self.begun.elapsed(), act);
        if let Some(instead) = policy_instead(&open.book).filter(|now| before != Some(*now)) {
            tracing::warn!(
                "the policy in the registry is of a later version than this manager, and stays there as it is; \
                 the pool is divided by {instead} until this manager is updated, or a policy is set"
            );
        }
        let Some(write) = open.book.begin_write() else { return Ok((outcome, receipt)) };
        if matches!(self.keeper, Keeper::Memory) {
            open.book.end_write(&write, true);
        } else {
            let ledger = Arc::clone(self);
            tokio::task::spawn_blocking(move || ledger.write_all(write));
        }
        Ok((outcome, receipt))
    }

    /// Whether the answer to a change may leave, or why it may not; none: it waits.
    fn outcome(&self, receipt: Receipt) -> Option<Result<(), LedgerError>> {
        let open = self.open();
        match open.book.durability(receipt) {
            Durability::Durable => Some(Ok(())),
            Durability::Pending => None,
            Durability::Failed => {
                let refusal = open.refusal.clone().expect("a failed write leaves its refusal");
                Some(Err(LedgerError::Unwritten(refusal)))
            }
            Durability::Superseded => Some(Err(self.not_leading())),
        }
    }

    fn check(&self, book: &Book) -> Result<(), LedgerError> {
        match &self.keeper {
            Keeper::Memory | Keeper::File(_) => Ok(()),
            Keeper::Etcd(seat) if book.is_of(seat.term()) => Ok(()),
            Keeper::Etcd(_) => Err(self.not_leading()),
        }
    }

    fn not_leading(&self) -> LedgerError {
        LedgerError::NotLeading(match &self.keeper {
            Keeper::Etcd(seat) => seat.leader(),
            Keeper::Memory | Keeper::File(_) => None,
        })
    }

    /// Writes, and then what was changed meanwhile, until no answer waits for a write.
    fn write_all(&self, first: Write) {
        let mut next = Some(first);
        while let Some(write) = next {
            let began = Instant::now();
            let written = self.write(&write);
            let took = began.elapsed();
            if took > SLOW_WRITE {
                let ms = took.as_millis() as u64;
                tracing::warn!(
                    ms,
                    "the registry took long to write; answers to orders and heartbeats waited"
                );
            }
            let mut open = self.open();
            open.book.end_write(&write, written.is_ok());
            if let Err(error) = written {
                tracing::error!("{}", with_causes(&error));
                open.refusal = Some(Arc::new(error));
            }
            next = open.book.begin_write();
            drop(open);
            self.turned.send_replace(());
        }
    }

    fn write(&self, write: &Write) -> Result<(), WriteError> {
        match (&self.keeper, write.term()) {
            (Keeper::File(store), _) => {
                Ok(store.lock().expect("no thread panics with it").write(&write.changes)?)
            }
            // Whatever term it is: etcd knows whether another has begun since.
            (Keeper::Etcd(seat), Some(term)) => Ok(seat.write(term, &write.changes)?),
            (Keeper::Etcd(_), None) => unreachable!("nothing is changed before a term"),
            (Keeper::Memory, _) => Ok(()),
        }
    }
}

fn policy_instead(book: &Book) -> Option<Choice> {
    book.see(Duration::ZERO, |registry, _| registry.policy_instead())
}
