//! Identifiers and chance.

use uuid::Uuid;

/// The bytes of a new task id: UUIDv7, so that ids sort by the time they were made, in one session strictly. The last byte, random otherwise, is the task's
/// retention class (`history`); what is left of chance, 66 bits within a millisecond, keeps ids apart.
pub fn task(class: u8) -> [u8; 16] {
    let mut id = *Uuid::now_v7().as_bytes();
    id[15] = class;
    id
}

/// The bytes of a new lease: random from the operating system, since a lease is a capability.
pub fn lease() -> [u8; 16] {
    *Uuid::new_v4().as_bytes()
}

/// A share from 0 to 1, for jitter.
pub fn draw() -> f64 {
    // The low 32 bits of a version 4 UUID are all random.
    f64::from(Uuid::new_v4().as_u128() as u32) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    #[test]
    fn ids_of_one_session_rise_and_leases_never_repeat() {
        let ids: Vec<_> = (0..10_000).map(|_| super::task(7)).collect();
        assert!(ids.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(ids.iter().all(|id| id[15] == 7));
        let leases: std::collections::HashSet<_> = (0..10_000).map(|_| super::lease()).collect();
        assert_eq!(leases.len(), 10_000);
    }

    #[test]
    fn draws_fill_the_unit_interval() {
        let draws: Vec<f64> = (0..10_000).map(|_| super::draw()).collect();
        assert!(draws.iter().all(|draw| (0.0..=1.0).contains(draw)));
        let mean = draws.iter().sum::<f64>() / 10_000.0;
        assert!((0.47..0.53).contains(&mean), "{mean}");
    }
}
