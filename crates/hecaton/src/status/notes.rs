//! Says what there is to say of a consumer beside its row: a line each.

use hecaton_memory::Size;
use hecaton_node::pagers::ConsumerReport;

/// What the policy lets a consumer hold of the pool.
pub(super) fn target(consumer: &ConsumerReport) -> Option<String> {
    let stats = consumer.stats.as_ref()?;
    let (target, held) = (Size(stats.target_bytes?), Size(stats.pool_bytes));
    let (puts, within) = (stats.puts_total, stats.puts_succeeded);
    Some(format!(
        "{}: may hold {target} of the pool by the policy, holds {held}; {within} of {puts} puts were within",
        consumer.name
    ))
}

/// What a consumer has on this host without limit.
pub(super) fn outside(consumer: &ConsumerReport) -> Option<String> {
    let outside = consumer.stats.as_ref()?.outside.describe()?;
    Some(format!("{}: {outside}", consumer.name))
}

/// What of a consumer's memory has gone cold and is coded.
pub(super) fn coded(consumer: &ConsumerReport) -> Option<String> {
    let pool = &consumer.stats.as_ref()?.pool;
    let code = pool.code.filter(|_| pool.coded_bytes > 0)?;
    let (coded, saved) = (Size(pool.coded_bytes), Size(pool.saved_bytes));
    Some(format!("{}: {coded} is cold, in code {code}: {saved} saved", consumer.name))
}

/// What of a consumer's memory in the pool is not as it is to be.
pub(super) fn risk(consumer: &ConsumerReport) -> Option<String> {
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
