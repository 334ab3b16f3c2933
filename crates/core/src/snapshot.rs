//! PostgreSQL snapshots as text, `xmin:xmax:running,running,…`.

/// The snapshot with transaction `own` counted as running. `None` if either text is not what PostgreSQL writes.
pub fn with_running(snapshot: &str, own: &str) -> Option<String> {
    let own: u64 = own.parse().ok()?;
    let mut parts = snapshot.split(':');
    let xmin: u64 = parts.next()?.parse().ok()?;
    let xmax: u64 = parts.next()?.parse().ok()?;
    let mut running = parts.next()?.split(',').filter(|xid| !xid.is_empty()).map(str::parse).collect::<Result<Vec<u64>, _>>().ok()?;
    if parts.next().is_some() {
        return None;
    }
    if own >= xmax {
        return Some(snapshot.to_string()); // not yet begun, as far as the snapshot knows
    }
    running.push(own);
    running.sort_unstable();
    running.dedup();
    let running: Vec<String> = running.iter().map(u64::to_string).collect();
    Some(format!("{}:{xmax}:{}", xmin.min(own), running.join(",")))
}

/// The snapshot with transaction `own` counted as ended, and nothing else changed: what had not begun by then counts as running. `None` if either text is not
/// what PostgreSQL writes.
pub fn with_ended(snapshot: &str, own: &str) -> Option<String> {
    let own: u64 = own.parse().ok()?;
    let (xmin, rest) = snapshot.split_once(':')?;
    let (xmax, running) = rest.split_once(':')?;
    let xmax: u64 = xmax.parse().ok()?;
    if own < xmax {
        return Some(snapshot.to_string());
    }
    let mut all: Vec<String> = running.split(',').filter(|xid| !xid.is_empty()).map(str::to_string).collect();
    all.extend((xmax..own).map(|xid| xid.to_string()));
    let first = if own == xmax && all.is_empty() { (own + 1).to_string() } else { xmin.to_string() };
    Some(format!("{first}:{}:{}", own + 1, all.join(",")))
}

#[cfg(test)]
mod tests {
    use super::{with_ended, with_running};

    #[test]
    fn an_ended_transaction_leaves_those_before_it_running() {
        assert_eq!(with_ended("100:110:100,105", "103").as_deref(), Some("100:110:100,105"));
        assert_eq!(with_ended("100:110:100", "112").as_deref(), Some("100:113:100,110,111"));
        assert_eq!(with_ended("110:110:", "112").as_deref(), Some("110:113:110,111"));
        assert_eq!(with_ended("110:110:", "110").as_deref(), Some("111:111:"));
        assert_eq!(with_ended("110", "110"), None);
    }

    #[test]
    fn a_transaction_is_inserted_in_order() {
        assert_eq!(with_running("100:110:100,105", "103").as_deref(), Some("100:110:100,103,105"));
        assert_eq!(with_running("105:110:105", "100").as_deref(), Some("100:110:100,105"));
        assert_eq!(with_running("110:110:", "109").as_deref(), Some("109:110:109"));
    }

    #[test]
    fn what_the_snapshot_already_excludes_stays_as_it_is() {
        assert_eq!(with_running("100:110:100", "110").as_deref(), Some("100:110:100"));
        assert_eq!(with_running("100:110:100", "100").as_deref(), Some("100:110:100"));
    }

    #[test]
    fn other_text_is_refused() {
        for (snapshot, own) in [("", "1"), ("1:2", "1"), ("1:2:x", "1"), ("1:2:3:4", "1"), ("1:2:", "-1")] {
            assert_eq!(with_running(snapshot, own), None, "{snapshot}");
        }
    }
}
