//! Formats the lines that `status` prints of a consumer below the tables.

use hecaton_memory::Size;
use hecaton_node::pagers::ConsumerReport;

/// Lines on the consumer that name no risk.
pub(super) fn notes(consumer: &ConsumerReport) -> impl Iterator<Item = String> {
    [coded(consumer), target(consumer), outside(consumer)].into_iter().flatten()
}

/// Lines on the consumer's data that is lost, or may be.
pub(super) fn risks(consumer: &ConsumerReport) -> impl Iterator<Item = String> {
    [missing(consumer), risk(consumer)].into_iter().flatten()
}

/// The consumer's target by the policy, if one limits it.
fn target(consumer: &ConsumerReport) -> Option<String> {
    let stats = consumer.stats.as_ref()?;
    let (target, held) = (Size(stats.target_bytes?), Size(stats.pool_bytes));
    let (puts, within) = (stats.puts_total, stats.puts_succeeded);
    Some(format!(
        "{}: may hold {target} of the pool by the policy, holds {held}; {within} of {puts} puts were within",
        consumer.name
    ))
}

/// Processes of the consumer that are not on the pool, if any.
fn outside(consumer: &ConsumerReport) -> Option<String> {
    let outside = consumer.stats.as_ref()?.outside.describe()?;
    Some(format!("{}: {outside}", consumer.name))
}

/// Pages of the consumer that were missing without a reason, if any.
fn missing(consumer: &ConsumerReport) -> Option<String> {
    let missing = consumer.stats.as_ref()?.describe_missing()?;
    Some(format!("{}: {missing}", consumer.name))
}

/// Memory that is cold and erasure-coded, if any.
fn coded(consumer: &ConsumerReport) -> Option<String> {
    let pool = &consumer.stats.as_ref()?.pool;
    let code = pool.code.filter(|_| pool.coded_bytes > 0)?;
    let (coded, saved) = (Size(pool.coded_bytes), Size(pool.saved_bytes));
    Some(format!("{}: {coded} is cold, in code {code}: {saved} saved", consumer.name))
}

/// Memory in the pool that is lost, degraded, damaged or to be moved, if any.
fn risk(consumer: &ConsumerReport) -> Option<String> {
    let pool = &consumer.stats.as_ref()?.pool;
    let mut parts = Vec::new();
    if pool.degraded_bytes > 0 {
        parts.push(format!("{} lacks a copy", Size(pool.degraded_bytes)));
    }
    if pool.to_move_bytes > 0 {
        parts.push(format!("{} is to be copied or moved", Size(pool.to_move_bytes)));
    }
    if pool.lost_bytes > 0 {
        parts.push(format!("{} is lost", Size(pool.lost_bytes)));
    }
    if pool.scrub.lost_pages > 0 {
        parts.push(format!("{} pages are damaged in every copy", pool.scrub.lost_pages));
    }
    let all = Size(pool.extents_bytes);
    (!parts.is_empty()).then(|| format!("{}: of {all}, {}", consumer.name, parts.join(", ")))
}
