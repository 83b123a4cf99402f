//! A thread for each application that is told by the manager: one that hangs keeps nobody else from
//! being told.

use crate::governor::Order;
use crate::sink::{Progress, Sink};
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// How often an application that gives back is asked how far it is.
const POLL: Duration = Duration::from_millis(100);

/// How often one that has settled is told again.
const KEEP: Duration = Duration::from_secs(10);

/// How soon one that could not be told is told again; each further time twice as late.
const RETRY: Duration = Duration::from_secs(1);

/// At most.
const MAX_RETRY: Duration = Duration::from_secs(60);

/// Result of an order.
#[derive(Debug)]
pub(crate) enum Outcome {
    Settled,
    Failed(String),
}

/// The thread. It ends when this is dropped, at the latest when the application has had its time to
/// answer.
#[derive(Debug)]
pub(crate) struct Worker {
    /// Until it is dropped.
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// `report` is told what becomes of each order, by its number.
    pub(crate) fn start(
        name: &str,
        sink: Box<dyn Sink>,
        report: impl Fn(u64, Outcome) + Send + 'static,
    ) -> io::Result<Worker> {
        let (sender, orders) = channel();
        let thread = thread::Builder::new()
            .name(format!("tell-{name}"))
            .spawn(move || work(sink, &orders, report))?;
        Ok(Worker { orders: Some(sender), thread: Some(thread) })
    }

    /// Hands it an order, which takes the place of those before it.
    pub(crate) fn tell(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // It listens until this is dropped.
            let _ = orders.send(order);
        }
    }

    /// Has the thread end; several do so at the same time when all are closed before the first is
    /// dropped.
    pub(crate) fn close(&mut self) {
        drop(self.orders.take());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}

fn work(mut sink: Box<dyn Sink>, orders: &Receiver<Order>, report: impl Fn(u64, Outcome)) {
    let Ok(mut order) = orders.recv() else { return };
    let mut has_settled = false;
    let mut retry = RETRY;
    loop {
        let outcome = match has_settled {
            true => sink.keep(&order).map(|()| Progress::Settled),
            false => sink.tell(&order),
        };
        let wait = match outcome {
            Ok(Progress::Draining) => POLL,
            Ok(Progress::Settled) => {
                if !has_settled {
                    report(order.number, Outcome::Settled);
                }
                (has_settled, retry) = (true, RETRY);
                KEEP
            }
            Err(error) => {
                report(order.number, Outcome::Failed(error.to_string()));
                has_settled = false;
                let wait = retry;
                retry = (retry * 2).min(MAX_RETRY);
                wait
            }
        };
        match orders.recv_timeout(wait) {
            Ok(next) => {
                order = orders.try_iter().last().unwrap_or(next);
                (has_settled, retry) = (false, RETRY);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
